// Sandboxes over their life: making, listing, time, forks, snapshots, ports, what is refused.
import {
  AuthenticationError,
  BuildError,
  E2B,
  Sandbox,
  SandboxError,
  SandboxNotFoundError,
  Secret,
  SecretError,
  Template,
  TemplateError,
  Volume,
  VolumeError,
} from 'e2b'
import { assert, eventually, get, raises, run } from './rig.mjs'

const metadata = { flavour: 'js', 'ödd &=?': 'v+%20 ü' }
const sandbox = await Sandbox.create('base', { timeoutMs: 600_000, metadata })

const left = async () => new Date((await sandbox.getInfo()).endAt).getTime() - Date.now()

await run({
  'what a sandbox tells of itself': async () => {
    const info = await sandbox.getInfo()
    assert.equal(info.sandboxId, sandbox.sandboxId)
    assert.deepEqual(info.metadata, metadata)
    assert.equal(info.state, 'running')
    const [sample] = await sandbox.getMetrics()
    assert.ok(sample.cpuCount >= 1 && sample.memUsed > 0 && sample.memUsed < sample.memTotal)
    assert.equal(await sandbox.isRunning(), true)
  },

  'time is counted from now': async () => {
    await sandbox.setTimeout(100_000)
    assert.ok(Math.abs((await left()) - 100_000) < 20_000)
    await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 50_000 }) // never shorter
    assert.ok((await left()) > 70_000)
    await Sandbox.setTimeout(sandbox.sandboxId, 600_000)
    assert.ok((await left()) > 500_000)
  },

  'lists by page, state and metadata': async () => {
    const more = await Promise.all([1, 2].map(() => Sandbox.create({ metadata })))
    const ids = [sandbox, ...more].map((one) => one.sandboxId).sort()
    await more[0].pause()
    const all = async (query, limit) => {
      const found = []
      const pages = Sandbox.list({ query, limit })
      while (pages.hasNext) found.push(...(await pages.nextItems()))
      return found.map((one) => one.sandboxId).sort()
    }
    assert.deepEqual(await all({ metadata }, 2), ids)
    assert.deepEqual(await all({ metadata, state: ['paused'] }), [more[0].sandboxId])
    assert.deepEqual(await all({ metadata: { flavour: 'other' } }), [])
    for (const one of more) assert.equal(await one.kill() ?? true, true)
    assert.deepEqual(await all({ metadata }), [sandbox.sandboxId])
  },

  'an end that pauses': async () => {
    const short = await Sandbox.create({ lifecycle: { onTimeout: 'pause', autoResume: false } })
    await short.files.write('kept', 'kept')
    await short.setTimeout(1_000)
    await eventually(async () => (await short.getInfo()).state === 'paused')
    const woken = await short.connect({ timeoutMs: 600_000 })
    assert.equal(await woken.files.read('kept'), 'kept')
    await woken.kill()
  },

  'an end that kills': async () => {
    const short = await Sandbox.create({ timeoutMs: 1_000 })
    await eventually(async () => !(await short.isRunning()))
    await raises(SandboxNotFoundError, () => Sandbox.connect(short.sandboxId))
  },

  'a snapshot outlives its sandbox': async () => {
    const source = await Sandbox.create()
    await source.files.write('state', 'then')
    const taken = await source.createSnapshot()
    await source.files.write('state', 'now')
    await source.kill()
    const later = await Sandbox.create(taken.snapshotId)
    assert.equal(await later.files.read('state'), 'then')
    await later.kill()
    const listed = await Sandbox.listSnapshots().nextItems()
    assert.ok(listed.some((one) => one.snapshotId === taken.snapshotId))
    assert.equal(await Sandbox.deleteSnapshot(taken.snapshotId), true)
    await raises(SandboxError, () => Sandbox.create(taken.snapshotId))
  },

  'forks go their own ways': async () => {
    await sandbox.files.write('common', 'common')
    const forks = await sandbox.fork({ count: 2 })
    for (const [n, one] of forks.entries()) await one.files.write('own', `${n}`)
    for (const [n, one] of forks.entries()) {
      assert.equal((await one.files.read('common')) + (await one.files.read('own')), `common${n}`)
      await one.kill()
    }
    assert.equal(await sandbox.files.exists('own'), false)
  },

  'a pause without memory': async () => {
    const one = await Sandbox.create()
    await one.files.write('kept', 'kept')
    await one.commands.run('sleep 322', { background: true, timeoutMs: 0 })
    assert.equal(await one.pause({ keepMemory: false }), true)
    const woken = await Sandbox.connect(one.sandboxId)
    assert.equal(await woken.files.read('kept'), 'kept')
    assert.deepEqual(await woken.commands.list(), [])
    await woken.kill()
  },

  'what a sandbox may reach is changed': async () => {
    await sandbox.updateNetwork({ denyOut: ['0.0.0.0/0'], allowOut: ['api.example.com'] })
    const { network } = await Sandbox.getFullInfo(sandbox.sandboxId)
    assert.deepEqual([network.allowOut, network.denyOut], [['api.example.com'], ['0.0.0.0/0']])
    await raises(SandboxError, () => sandbox.updateNetwork({ denyOut: ['192.0.2.1'] }))
    await sandbox.updateNetwork({ allowInternetAccess: false })
  },

  'a client with its own options': async () => {
    const { E2B_API_URL: apiUrl, E2B_SANDBOX_URL: sandboxUrl, STRANGER_KEY: apiKey } = process.env
    const bound = new E2B({ apiUrl, sandboxUrl, apiKey })
    const one = await bound.Sandbox.create()
    await raises(SandboxNotFoundError, () => Sandbox.connect(one.sandboxId))
    assert.equal((await one.commands.run('echo bound')).stdout, 'bound\n')
    assert.equal(await bound.Sandbox.kill(one.sandboxId), true)
  },

  'ports have addresses': async () => {
    await sandbox.files.write('site/index.html', 'served inside')
    await sandbox.commands.run('cd site && exec python3 -m http.server 8000', {
      background: true,
      timeoutMs: 0,
    })
    const host = sandbox.getHost(8000)
    assert.ok(host.startsWith(`8000-${sandbox.sandboxId}.localhost:`), host)
    assert.equal((await get(host, '/index.html')).text, 'served inside')
    const other = host.replace(sandbox.sandboxId, 'ses-' + '0'.repeat(24))
    assert.equal((await get(other, '/')).status, 404)
  },

  'what is wrong or not there': async () => {
    await raises(AuthenticationError, () => Sandbox.create({ apiKey: 'e2b_00' }))
    await raises(SandboxNotFoundError, () => Sandbox.connect('nonsense'))
    await raises(SandboxError, () => Sandbox.create('no-such-template'))
    const refused = await raises(SandboxError, () =>
      Sandbox.create({ network: { allowPublicTraffic: false } })
    )
    assert.match(refused.message, /ports/)
    assert.equal(await Template.exists('base'), true)
    assert.equal(await Template.exists('no-such-template'), false)
    await raises(BuildError, () => Template.build(Template().fromImage('debian'), 'own'))
    await raises(TemplateError, () => Template.getTags('base'))
    await raises(VolumeError, () => Volume.create('own'))
    await raises(VolumeError, () => Volume.list())
    await raises(SecretError, () => Secret.create('own', 'value'))
    await raises(SecretError, () => Secret.list().nextItems())
    await raises(SandboxError, () => Sandbox.create({ mcp: { fetch: {} } }))
  },

  'another tenant sees nothing': async () => {
    const theirs = { apiKey: process.env.STRANGER_KEY }
    const id = sandbox.sandboxId
    for (const work of [
      () => Sandbox.connect(id, theirs),
      () => Sandbox.getInfo(id, theirs),
      () => Sandbox.pause(id, theirs),
      () => Sandbox.setTimeout(id, 1000, theirs),
      () => Sandbox.createSnapshot(id, theirs),
    ])
      await raises(SandboxNotFoundError, work)
    assert.equal(await Sandbox.kill(id, theirs), false)
    assert.deepEqual(await Sandbox.list(theirs).nextItems(), [])
    assert.equal(await sandbox.isRunning(), true)
  },

  'killed once': async () => {
    assert.equal(await Sandbox.kill(sandbox.sandboxId), true)
    assert.equal(await sandbox.isRunning(), false)
    assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  },
})
