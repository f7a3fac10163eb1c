// Checks, each told as one line of JSON on standard output, so that what failed is named with its
// reason and nothing is taken for checked that was not.
import assert from 'node:assert/strict'
import http from 'node:http'

export { assert }

export function say(line) {
  process.stdout.write(JSON.stringify(line) + '\n')
}

export async function check(name, work) {
  try {
    say({ check: name, told: (await work()) ?? null })
  } catch (error) {
    say({ check: name, error: String(error?.stack ?? error) })
  }
}

// The error of `work`, which has to be of this kind.
export async function raises(kind, work) {
  let done
  try {
    done = await work()
  } catch (error) {
    assert.ok(error instanceof kind, `${kind.name} expected, not ${error?.stack ?? error}`)
    return error
  }
  assert.fail(`${kind.name} expected, not ${JSON.stringify(done)}`)
}

export const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000))

// The condition's first true value.
export async function eventually(condition, seconds = 60) {
  const end = Date.now() + seconds * 1000
  for (;;) {
    const value = await condition()
    if (value) return value
    assert.ok(Date.now() < end, `did not come true: ${condition}`)
    await pause(0.05)
  }
}

// A request to a name below localhost, which is not looked up everywhere.
export function get(host, path) {
  const where = { host: '127.0.0.1', port: host.split(':')[1], path, headers: { Host: host } }
  return new Promise((done, failed) => {
    http
      .get(where, (answer) => {
        const parts = []
        answer.on('data', (part) => parts.push(part))
        answer.on('end', () =>
          done({ status: answer.statusCode, text: Buffer.concat(parts).toString() })
        )
      })
      .on('error', failed)
  })
}

// Runs checks one after the other; the last line says that none was left out.
export async function run(checks) {
  for (const [name, work] of Object.entries(checks)) await check(name, work)
  say({ end: Object.keys(checks).length })
  // Streams that a killed sandbox leaves behind hold the process open.
  process.exit(0)
}
