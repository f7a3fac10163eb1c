#!/usr/bin/env bash
# Make .venv with the locked dependencies and this package, editable.
#
# Done again only when the lock, the packaging or the place of the tree has changed; two runs at
# once wait for each other; an interrupted one leaves no stamp, so the next one goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

digest() { cat -- "$@" | sha256sum | cut -c1-32; }

fits() { # an interpreter that is new enough and can make a venv with pip
	"$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
	local name path
	for name in ${PYTHON:-} python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
		path=$(command -v "$name") || continue
		if fits "$path"; then
			echo "$path"
			return
		fi
	done
	return 1
}

deps_stamp=$(digest requirements.lock)
package_stamp=$({ pwd && cat pyproject.toml; } | sha256sum | cut -c1-32)

fresh() { # stamps say all is done, and the interpreter is still there
	[[ -x .venv/bin/python && $(cat .venv/.deps 2>/dev/null) == "$deps_stamp" ]] &&
		[[ $(cat .venv/.package 2>/dev/null) == "$package_stamp" ]]
}

fresh && exit 0
exec 9<scripts/venv.sh
flock 9
fresh && exit 0

if ! python=$(find_python); then
	if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
		echo "error: Python 3.11 or newer with venv is needed (Debian: python3-venv)" >&2
		exit 1
	fi
	echo "installing python3-venv"
	export DEBIAN_FRONTEND=noninteractive
	install=(apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=600 install)
	"${install[@]}" python3 python3-venv </dev/null >/dev/null 2>&1 || {
		# No index yet, or one so old that its files are gone from the mirror.
		apt-get -qq -o DPkg::Lock::Timeout=600 update </dev/null
		"${install[@]}" python3 python3-venv </dev/null >/dev/null
	}
	python=$(find_python) || {
		echo "error: no Python of 3.11 or newer; Debian 12 and 13 have one" >&2
		exit 1
	}
fi

if [[ ! -x .venv/bin/python ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
	[[ $(.venv/bin/python -c 'import sys; print(sys.prefix)') != "$PWD/.venv" ]]; then
	echo "making .venv with $("$python" --version)"
	rm -rf .venv
	"$python" -m venv .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input -qq)
if [[ $(cat .venv/.deps 2>/dev/null) != "$deps_stamp" ]]; then
	echo "installing the locked dependencies"
	rm -f .venv/.deps .venv/.package
	"${pip[@]}" install --require-hashes -r requirements.lock </dev/null
	echo "$deps_stamp" >.venv/.deps
fi
echo "installing sojourn, editable"
"${pip[@]}" install --no-build-isolation --no-deps --editable . </dev/null
echo "$package_stamp" >.venv/.package
