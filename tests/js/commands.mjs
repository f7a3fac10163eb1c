// Commands and terminals of one sandbox.
import { CommandExitError, NotFoundError, Sandbox, SandboxNotFoundError, TimeoutError } from 'e2b'
import { assert, eventually, raises, run } from './rig.mjs'

const sandbox = await Sandbox.create({ timeoutMs: 600_000, envs: { CREATED: '1' } })
const { commands, files, pty } = sandbox

await run({
  'output is exact, and the streams are apart': async () => {
    const heard = []
    const done = await commands.run("printf 'a\\n\\nb'; printf 'ü\\n\\n' >&2", {
      onStdout: (text) => heard.push(text),
    })
    assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['a\n\nb', 'ü\n\n', 0])
    assert.equal(heard.join(''), 'a\n\nb')
  },

  'exit codes and signals': async () => {
    for (const code of [1, 42, 255]) {
      const error = await raises(CommandExitError, () =>
        commands.run(`echo out; echo err >&2; exit ${code}`)
      )
      assert.deepEqual([error.exitCode, error.stdout, error.stderr], [code, 'out\n', 'err\n'])
    }
    const error = await raises(CommandExitError, () => commands.run('kill -9 $$'))
    assert.match(error.error ?? error.message, /killed/)
  },

  'environment, directory and user': async () => {
    const own = await commands.run('echo $CREATED $GIVEN; whoami; pwd', { envs: { GIVEN: '2' } })
    assert.deepEqual(own.stdout.split('\n'), ['1 2', 'user', '/home/user', ''])
    const root = await commands.run('whoami; pwd', { user: 'root', cwd: '/tmp' })
    assert.equal(root.stdout, 'root\n/tmp\n')
  },

  'in the background: list, connect, kill': async () => {
    const handle = await commands.run('echo begun; sleep 300', { background: true })
    const listed = (await commands.list()).find((one) => one.pid === handle.pid)
    assert.deepEqual([listed.cmd, listed.args[2]], ['/bin/bash', 'echo begun; sleep 300'])
    const again = await commands.connect(handle.pid)
    assert.equal(again.pid, handle.pid)
    assert.equal(await commands.kill(handle.pid), true)
    await raises(CommandExitError, () => again.wait())
    await raises(CommandExitError, () => handle.wait())
    assert.equal(await commands.kill(handle.pid), false)
    await raises(NotFoundError, () => commands.connect(4_000_000))
  },

  'standard input and its end': async () => {
    const handle = await commands.run('cat; echo end', { background: true, stdin: true })
    await commands.sendStdin(handle.pid, 'öne\n')
    await commands.sendStdin(handle.pid, new Uint8Array([116, 119, 111, 10]))
    await commands.closeStdin(handle.pid)
    assert.equal((await handle.wait()).stdout, 'öne\ntwo\nend\n')
    assert.equal((await commands.run('wc -c')).stdout.trim(), '0')
  },

  'a timeout ends the command': async () => {
    await raises(TimeoutError, () => commands.run('sleep 311', { timeoutMs: 1000 }))
    await eventually(async () => !(await commands.list()).some((one) => /311/.test(one.args)))
  },

  'a command goes on without its client': async () => {
    const handle = await commands.run(
      'sleep 0.2; head -c 40000000 /dev/zero; touch /tmp/went-on',
      { background: true, timeoutMs: 0 }
    )
    await handle.disconnect()
    await eventually(() => files.exists('/tmp/went-on'))
  },

  'a terminal': async () => {
    const seen = []
    const terminal = await pty.create({
      cols: 80,
      rows: 24,
      timeoutMs: 0,
      onData: (data) => void seen.push(Buffer.from(data)),
    })
    await pty.resize(terminal.pid, { cols: 123, rows: 40 })
    await pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; tty; exit 5\n'))
    const error = await raises(CommandExitError, () => terminal.wait())
    assert.equal(error.exitCode, 5)
    const text = Buffer.concat(seen).toString()
    assert.ok(text.includes('40 123') && text.includes('/dev/pts/'), text)
    const other = await pty.create({ cols: 80, rows: 24, timeoutMs: 0, onData: () => {} })
    const again = await pty.connect(other.pid, { onData: () => {} })
    assert.equal(await pty.kill(other.pid), true)
    await raises(CommandExitError, () => other.wait())
    await raises(CommandExitError, () => again.wait())
  },

  'a command lives through a pause': async () => {
    const handle = await commands.run(
      'n=0; while [ ! -e /tmp/stop ]; do echo $((n++)); sleep 0.05; done; echo last; exit 9',
      { background: true, timeoutMs: 0 }
    )
    assert.equal(await sandbox.pause(), true)
    assert.equal(await sandbox.pause(), false)
    // The open stream ends, in the SDK's own words.
    const cut = await raises(TimeoutError, () => handle.wait())
    assert.match(cut.message, /not found|not running/)
    await raises(SandboxNotFoundError, () => commands.run('echo no'))
    assert.equal(await sandbox.isRunning(), false)
    const woken = await Sandbox.connect(sandbox.sandboxId)
    assert.equal(await woken.isRunning(), true)
    const again = await woken.commands.connect(handle.pid, { timeoutMs: 0 })
    await woken.commands.run('touch /tmp/stop')
    const ended = await raises(CommandExitError, () => again.wait())
    assert.equal(ended.exitCode, 9)
    assert.ok(ended.stdout.endsWith('last\n'))
  },

  'a kill ends the streams of the sandbox': async () => {
    const handle = await commands.run('sleep 300', { background: true, timeoutMs: 0 })
    const ended = handle.wait().catch((error) => error)
    assert.equal(await Sandbox.kill(sandbox.sandboxId), true)
    assert.ok((await ended) instanceof TimeoutError, String(await ended))
    assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  },
})
