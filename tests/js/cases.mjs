// What every client has to hold, through E2B's JavaScript SDK; see tests/integration/test_client_cases.py.
//   node cases.mjs output SANDBOX | parallel SANDBOX | huge SANDBOX | strange SANDBOX
import { createHash } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import { Sandbox, SandboxNotFoundError } from 'e2b'
import { assert, raises, say } from './rig.mjs'

const [, , name, id] = process.argv
const sha256 = (data) => createHash('sha256').update(data).digest('hex')

const cases = {
  async output({ commands }) {
    const text = (await commands.run('base64 -w0 /tmp/noise', { user: 'root' })).stdout
    const long = (await commands.run('yes 0123456789abcde | head -c 17600000')).stdout
    return {
      noise: sha256(Buffer.from(text, 'base64')),
      long: [long.length, sha256(long)],
    }
  },

  async parallel({ commands }) {
    const one = async (n) => {
      const error = await commands
        .run(
          `echo w${n} 1; sleep 0.${n % 7}; echo w${n} 2; echo e${n} >&2; exit ${n + 1}`
        )
        .catch((error) => error)
      return [error.stdout, error.stderr, error.exitCode]
    }
    return Promise.all(Array.from({ length: 20 }, (_, n) => one(n)))
  },

  async huge({ files }) {
    const stream = await files.read('/tmp/sparse', { format: 'stream', user: 'root' })
    const parts = []
    let size = 0
    for await (const part of stream) {
      parts.push(part)
      size += part.length
      if (size > 3_000_000) break
    }
    const head = Buffer.concat(parts)
    assert.equal(head.subarray(0, 3_000_000).indexOf('x'), -1)
    const status = await readFile('/proc/self/status', 'utf8')
    return { size, peak: Number(/VmHWM:\s+(\d+)/.exec(status)[1]) * 1024 }
  },
}

if (name === 'strange') {
  const error = await raises(SandboxNotFoundError, () => Sandbox.connect(id))
  await raises(SandboxNotFoundError, () => Sandbox.getInfo(id))
  assert.equal(await Sandbox.kill(id), false)
  say({ message: error.message })
} else {
  say(await cases[name](await Sandbox.connect(id)))
}
process.exit(0)
