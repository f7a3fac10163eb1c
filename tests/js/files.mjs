// Files of one sandbox: contents, listings, watching, signed addresses.
import { FileNotFoundError, FileType, FilesystemEventType, InvalidArgumentError, Sandbox } from 'e2b'
import { assert, eventually, raises, run } from './rig.mjs'

const sandbox = await Sandbox.create({ timeoutMs: 600_000 })
const { commands, files } = sandbox
const noise = crypto.getRandomValues(new Uint8Array(60_000))
const blob = Buffer.concat(Array(50).fill(noise)) // 3 MB

await run({
  'contents of every kind': async () => {
    const info = await files.write('deep/er/blob', blob.buffer.slice(blob.byteOffset, blob.byteOffset + blob.length))
    assert.deepEqual([info.name, info.path], ['blob', '/home/user/deep/er/blob'])
    assert.ok(blob.equals(await files.read('deep/er/blob', { format: 'bytes' })))
    const parts = []
    for await (const part of await files.read('deep/er/blob', { format: 'stream' })) parts.push(part)
    assert.ok(blob.equals(Buffer.concat(parts)))
    const held = await files.read('deep/er/blob', { format: 'blob' })
    assert.ok(blob.equals(Buffer.from(await held.arrayBuffer())))
    await files.write('text', 'grüß\n')
    assert.equal(await files.read('text'), 'grüß\n')
    await files.write('empty', '')
    assert.equal(await files.read('empty'), '')
    const many = [0, 1, 2, 3].map((n) => ({ path: `/tmp/m${n}`, data: `${n}`.repeat(n) }))
    const written = await files.writeFiles(many)
    assert.deepEqual(written.map((one) => one.path), many.map((one) => one.path))
    assert.equal(await files.read('/tmp/m3'), '333')
    await files.write('/root/own', 'x', { user: 'root' })
    assert.equal((await commands.run('stat -c %U /root/own', { user: 'root' })).stdout, 'root\n')
    const owners = await commands.run('stat -c %U deep deep/er deep/er/blob')
    assert.equal(owners.stdout, 'user\n'.repeat(3))
  },

  'a streamed upload': async () => {
    const stream = new Blob([blob]).stream()
    await files.write('streamed', stream)
    assert.ok(blob.equals(await files.read('streamed', { format: 'bytes' })))
  },

  'paths are taken literally': async () => {
    const names = ["it's; $(touch pwned) `x`.txt", 'quo"te\\slash ä.txt', 'new\nline.txt', '-n', 'a b%20c']
    for (const name of names) {
      await files.write(`odd/${name}`, name)
      assert.equal(await files.read(`odd/${name}`), name)
    }
    assert.deepEqual((await files.list('odd')).map((one) => one.name).sort(), [...names].sort())
    assert.equal(await files.exists('pwned'), false)
  },

  'what files are like': async () => {
    await commands.run('mkdir -p look/a/b; echo 12345 > look/f; chmod 640 look/f; ln -s f look/l')
    const info = await files.getInfo('look/f')
    assert.deepEqual([info.name, info.path, info.size], ['f', '/home/user/look/f', 6])
    assert.deepEqual([info.mode, info.permissions], [0o640, '-rw-r-----'])
    assert.deepEqual([info.owner, info.group, info.type], ['user', 'user', FileType.FILE])
    assert.ok(Math.abs(info.modifiedTime.getTime() - Date.now()) < 600_000)
    assert.equal((await files.getInfo('look/l')).symlinkTarget, 'f')
    const names = (await files.list('look')).map((one) => one.name)
    assert.deepEqual(names.sort(), ['a', 'f', 'l'])
    const deep = (await files.list('look', { depth: 2 })).map((one) => one.path)
    assert.ok(deep.includes('/home/user/look/a/b'))
    assert.deepEqual([await files.exists('look/f'), await files.exists('look/none')], [true, false])
  },

  'moving, making, removing': async () => {
    assert.equal(await files.makeDir('made/by/us'), true)
    assert.equal(await files.makeDir('made/by/us'), false)
    await files.write('made/one', '1')
    assert.equal((await files.rename('made/one', 'made/two')).path, '/home/user/made/two')
    assert.equal(await files.read('made/two'), '1')
    await files.remove('made')
    assert.equal(await files.exists('made'), false)
  },

  'what is not there': async () => {
    for (const work of [
      () => files.read('none'),
      () => files.list('none'),
      () => files.getInfo('none'),
      () => files.rename('none', 'other'),
      () => files.watchDir('none', () => {}),
    ])
      await raises(FileNotFoundError, work)
    await files.write('plain', 'x')
    await raises(InvalidArgumentError, () => files.list('plain'))
    await raises(InvalidArgumentError, () => files.remove('/'))
  },

  'watching a directory': async () => {
    await files.makeDir('watched/below')
    const seen = []
    const handle = await files.watchDir('watched', (event) => void seen.push(event), {
      recursive: true,
      timeoutMs: 0,
    })
    await files.write('watched/below/new', 'x')
    await commands.run('chmod 600 watched/below/new; mv watched/below/new watched/moved; rm watched/moved')
    const has = (name, type) => seen.some((one) => one.name === name && one.type === type)
    await eventually(
      () =>
        has('below/new', FilesystemEventType.WRITE) &&
        has('below/new', FilesystemEventType.CHMOD) &&
        has('below/new', FilesystemEventType.RENAME) &&
        has('moved', FilesystemEventType.CREATE) &&
        has('moved', FilesystemEventType.REMOVE)
    )
    await handle.stop()
    const before = seen.length
    await files.write('watched/later', 'x')
    await files.exists('watched/later')
    assert.equal(seen.length, before)
  },

  'signed addresses': async () => {
    await files.write('/home/user/signed file.txt', 'mine')
    const down = await sandbox.downloadUrl('/home/user/signed file.txt', { useSignatureExpiration: 60_000 })
    assert.equal(await (await fetch(down)).text(), 'mine')
    assert.equal((await fetch(down.replace('signed', 'other'))).status, 401)
    assert.equal((await fetch(down, { method: 'POST', body: 'x' })).status, 401)
    const up = await sandbox.uploadUrl('/home/user/up.bin', { useSignatureExpiration: 60_000 })
    const form = new FormData()
    form.append('file', new Blob([new Uint8Array([0, 1, 2])]), 'whatever')
    assert.equal((await fetch(up, { method: 'POST', body: form })).status, 200)
    assert.deepEqual([...(await files.read('up.bin', { format: 'bytes' }))], [0, 1, 2])
    const old = await sandbox.downloadUrl('/home/user/up.bin', { useSignatureExpiration: -10_000 })
    assert.equal((await fetch(old)).status, 401)
  },

  'all of it ends with the sandbox': async () => {
    assert.equal(await Sandbox.kill(sandbox.sandboxId), true)
  },
})
