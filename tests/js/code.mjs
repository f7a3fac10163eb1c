// Code in contexts, by E2B's code interpreter.
import { NotFoundError, Sandbox, SandboxError, TimeoutError } from '@e2b/code-interpreter'
import { assert, eventually, raises, run } from './rig.mjs'

const sandbox = await Sandbox.create({ timeoutMs: 600_000 })

await run({
  'results, output and errors': async () => {
    const heard = []
    const done = await sandbox.runCode(
      "import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 41\nx + 1",
      { onStdout: (message) => heard.push(message.line) }
    )
    assert.deepEqual([done.text, done.executionCount], ['42', 1])
    assert.deepEqual([done.logs.stdout, done.logs.stderr], [['out\n'], ['err\n']])
    assert.deepEqual(heard, ['out\n'])
    assert.equal((await sandbox.runCode('x += 1; x')).text, '42')
    const failed = (await sandbox.runCode('1/0')).error
    assert.deepEqual([failed.name, failed.value], ['ZeroDivisionError', 'division by zero'])
    const rich = await sandbox.runCode(
      "class Rich:\n    def _repr_html_(self): return '<b>r</b>'\n    def __repr__(self): return 'rich'\nRich()"
    )
    const [shown] = rich.results
    assert.deepEqual([shown.text, shown.html, shown.isMainResult], ['rich', '<b>r</b>', true])
    const env = "import os; os.environ.get('ONCE')"
    assert.equal((await sandbox.runCode(env, { envs: { ONCE: '1' } })).text, "'1'")
    assert.deepEqual((await sandbox.runCode(env)).results, [])
  },

  'contexts are apart': async () => {
    const one = await sandbox.createCodeContext()
    const two = await sandbox.createCodeContext({ cwd: '/tmp' })
    await sandbox.runCode('mine = 1', { context: one })
    assert.ok((await sandbox.runCode('mine', { context: two })).error)
    const where = await sandbox.runCode('import os; os.getcwd()', { context: two })
    assert.equal(where.text, "'/tmp'")
    const listed = (await sandbox.listCodeContexts()).map((context) => context.id)
    assert.ok(listed.includes(one.id) && listed.includes(two.id))
    await sandbox.restartCodeContext(one)
    assert.ok((await sandbox.runCode('mine', { context: one })).error)
    await sandbox.removeCodeContext(one)
    await raises(NotFoundError, () => sandbox.runCode('1', { context: one }))
    await raises(SandboxError, () => sandbox.createCodeContext({ language: 'r' }))
  },

  'code that takes too long': async () => {
    await sandbox.runCode('kept = 1')
    await raises(TimeoutError, () => sandbox.runCode('while True: pass', { timeoutMs: 1000 }))
    assert.equal((await sandbox.runCode('kept')).text, '1')
  },

  'code through a pause': async () => {
    const context = await sandbox.createCodeContext()
    await sandbox.runCode('held = [1, 2]', { context })
    await sandbox.pause()
    const woken = await Sandbox.connect(sandbox.sandboxId)
    assert.equal((await woken.runCode('held', { context })).text, '[1, 2]')
  },

  'code that a kill interrupts is no result': async () => {
    const ended = sandbox
      .runCode("import time; open('/tmp/begun', 'w'); time.sleep(300)")
      .catch((error) => error)
    await eventually(() => sandbox.files.exists('/tmp/begun'))
    assert.equal(await Sandbox.kill(sandbox.sandboxId), true)
    assert.ok((await ended) instanceof TimeoutError, String(await ended))
  },
})
