"""The Debian archive as this host already reaches it, without touching the host's apt.

Guarantee: packages come from the mirror, through the proxy and under the signatures that the host's
own apt uses; everything apt writes for it (lists, cache, state) goes into a private directory, and
no hook of the host runs. Only archive indexes signed by a key the host trusts for Debian are taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit
from sojourn.node.setup.commands import run_command

KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)

_ONE_LINE = re.compile(r"(?P<types>deb(?:-src)?)\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<rest>\S.*)")
_OPTION = re.compile(r"([A-Za-z-]+)([+-]?=)(\S+)")
_FALSE = {"no", "false", "off", "0", "without", "disable"}


class AptSource(msgspec.Struct, frozen=True):
    """One entry of the host's package sources; options have the deb822 names in lower case."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: dict[str, str] = {}


class Mirror(msgspec.Struct, frozen=True):
    """Where Debian's packages come from, and the keyring (a file, or keys in armour)."""

    uri: str
    signed_by: str | None


# -- reading the host's sources -------------------------------------------------------------


def parse_one_line(text: str) -> Iterator[AptSource]:
    """The entries of a `.list` file: `deb [option=value ...] uri suite component ...`."""
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.partition("#")[0].strip())
        if match is None or match["types"] != "deb":
            continue
        words = match["rest"].split()
        if len(words) < 2:
            continue
        options = {
            name.lower(): value.replace(",", " ")
            for name, _, value in _OPTION.findall(match["options"] or "")
        }
        yield AptSource((words[0],), (words[1],), tuple(words[2:]), options)


def parse_deb822(text: str) -> Iterator[AptSource]:
    """The entries of a `.sources` file: paragraphs of `Field: value`, with continuation lines."""
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", text.replace("\r\n", "\n")):
        fields: dict[str, str] = {}
        last: str | None = None
        for line in paragraph.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            if line[0] in " \t":
                if last is not None:
                    fields[last] += "\n" + line.strip()
                continue
            name, colon, value = line.partition(":")
            last = name.strip().lower() if colon else None
            if last is not None:
                fields[last] = value.strip()
        if fields.pop("enabled", "yes").lower() in _FALSE:
            continue
        if "deb" not in fields.pop("types", "").split():
            continue
        uris = tuple(fields.pop("uris", "").split())
        suites = tuple(fields.pop("suites", "").split())
        components = tuple(fields.pop("components", "").split())
        if uris and suites:
            yield AptSource(uris, suites, components, fields)


def host_sources(directory: Path = Path("/etc/apt")) -> list[AptSource]:
    """Every enabled entry of the host, in the order apt reads the files."""
    files = [directory / "sources.list"]
    parts = directory / "sources.list.d"
    if parts.is_dir():
        files += sorted(p for p in parts.iterdir() if p.suffix in {".list", ".sources"})
    sources: list[AptSource] = []
    for path in files:
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            parse = parse_deb822 if path.suffix == ".sources" else parse_one_line
            sources.extend(parse(text))
    return sources


def _is_main_suite(suite: str, codename: str) -> bool:
    return suite in {codename, "stable", "oldstable", "testing", "sid", "unstable"}


def debian_mirrors(sources: Iterable[AptSource], codename: str) -> list[Mirror]:
    """The mirrors of Debian's main archive among the sources, the likeliest first.

    Archives of others may use the same suite names, so what speaks for Debian is counted: its
    keyring, a path that ends in `debian`, the sister suite `<codename>-updates`, the component
    `main`. Security and backports suites live in other archives or are no whole suite.
    """
    all_sources = list(sources)
    suites_at: dict[str, set[str]] = {}
    for source in all_sources:
        for uri in source.uris:
            suites_at.setdefault(uri.rstrip("/"), set()).update(source.suites)
    ranked: list[tuple[int, int, Mirror]] = []
    for position, source in enumerate(all_sources):
        if not any(_is_main_suite(suite, codename) for suite in source.suites):
            continue
        if "main" not in source.components:
            continue
        signed_by = source.options.get("signed-by")
        for uri in source.uris:
            bare = uri.rstrip("/")
            score = 0
            score += 4 if signed_by and "debian-archive" in signed_by else 0
            score += 3 if bare.rsplit("/", 1)[-1] == "debian" else 0
            score += 2 if "debian.org" in bare else 0
            score += 2 if f"{codename}-updates" in suites_at[bare] else 0
            score -= 8 if signed_by and "debian-archive" not in signed_by else 0
            ranked.append((-score, position, Mirror(bare, signed_by)))
    unique: dict[str, Mirror] = {}
    for *_, mirror in sorted(ranked, key=lambda entry: entry[:2]):
        unique.setdefault(mirror.uri, mirror)
    return list(unique.values())


def security_archives(sources: Iterable[AptSource], codename: str) -> list[Mirror]:
    """Where the host gets Debian's security updates from, if it does."""
    found: dict[str, Mirror] = {}
    for source in sources:
        if f"{codename}-security" in source.suites and "main" in source.components:
            for uri in source.uris:
                found.setdefault(uri.rstrip("/"), Mirror(uri.rstrip("/"), _key(source)))
    return list(found.values())


def _key(source: AptSource) -> str | None:
    return source.options.get("signed-by")


def default_keyring() -> str | None:
    """Debian's own keyring on this host."""
    return next((str(path) for path in KEYRINGS if path.is_file()), None)


def host_codename(os_release: Path = Path("/etc/os-release")) -> str:
    """The code name of the host's Debian release. Raises HostUnfit on another system."""
    facts: dict[str, str] = {}
    if os_release.is_file():
        for line in os_release.read_text(encoding="utf-8").splitlines():
            name, equals, value = line.partition("=")
            if equals:
                facts[name.strip()] = value.strip().strip("\"'")
    codename = facts.get("VERSION_CODENAME", "")
    if facts.get("ID") != "debian" or not codename:
        raise HostUnfit(
            f"set-up knows Debian; this host is {facts.get('PRETTY_NAME', 'unknown')}",
            next_step="Set SOJOURN_RUNSC, SOJOURN_SUPERVISOR and SOJOURN_TEMPLATE_DIR by hand.",
        )
    return codename


def mirrors_of_host() -> list[Mirror]:
    """The Debian mirrors this host uses. Raises HostUnfit when it has none."""
    mirrors = debian_mirrors(host_sources(), host_codename())
    if not mirrors:
        raise HostUnfit(
            "no Debian mirror in /etc/apt/sources.list or /etc/apt/sources.list.d",
            next_step="Add the Debian archive to the host's package sources.",
        )
    return mirrors


# -- a private apt --------------------------------------------------------------------------


def source_paragraph(mirror: Mirror, suites: Iterable[str]) -> str:
    """A deb822 paragraph for a mirror's component `main`."""
    lines = ["Types: deb", f"URIs: {mirror.uri}", f"Suites: {' '.join(suites)}", "Components: main"]
    signed_by = mirror.signed_by or default_keyring()
    if signed_by is not None:
        if "\n" in signed_by:
            # Keys in armour: every line of a continuation starts with a space.
            lines.append("Signed-By:")
            lines += [f" {line.strip() or '.'}" for line in signed_by.strip().splitlines()]
        else:
            lines.append(f"Signed-By: {signed_by}")
    return "\n".join(lines) + "\n"


class PrivateApt:
    """An apt of its own under `directory`, which the caller removes afterwards."""

    def __init__(self, directory: Path, sources: str) -> None:
        self.directory = directory
        for name in ("state/lists/partial", "cache/archives/partial", "etc", "download"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / "etc" / "private.sources").write_text(sources, encoding="utf-8")
        (directory / "state" / "status").touch()
        # Read by `-c` after the host's own configuration, whose proxies and certificates stay.
        (directory / "apt.conf").write_text(
            "#clear APT::Update::Pre-Invoke;\n"
            "#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n"
            "#clear Acquire::IndexTargets::deb;\n"
            'Acquire::IndexTargets::deb::Packages { MetaKey "$(COMPONENT)/binary-$(ARCHITECTURE)/'
            'Packages"; flatMetaKey "Packages"; ShortDescription "Packages"; '
            'Description "$(RELEASE)/$(COMPONENT) $(ARCHITECTURE) Packages"; Optional "no"; };\n'
            'Acquire::Languages "none";\n'
            'Acquire::Retries "3";\n'
            'APT::Sandbox::User "root";\n'
            f'Dir::State "{directory}/state";\n'
            f'Dir::State::lists "{directory}/state/lists";\n'
            f'Dir::State::status "{directory}/state/status";\n'
            f'Dir::Cache "{directory}/cache";\n'
            f'Dir::Etc::sourcelist "/dev/null";\n'
            f'Dir::Etc::sourceparts "{directory}/etc";\n',
            encoding="utf-8",
        )

    def _apt(self, *arguments: str, what: str) -> str:
        return run_command(
            ["apt-get", "-q", "-c", str(self.directory / "apt.conf"), *arguments],
            what=what,
            next_step="Check that `apt-get update` works on this host, then run set-up again.",
            cwd=self.directory / "download",
        )

    def update(self) -> None:
        """Fetch and check the indexes."""
        self._apt("-o", "APT::Update::Error-Mode=any", "update", what="reading the package index")

    def download(self, package: str) -> Path:
        """Fetch one package, checked against the signed index."""
        self._apt("download", package, what=f"fetching the package {package}")
        found = list((self.directory / "download").glob(f"{package}_*.deb"))
        if len(found) != 1:
            raise HostUnfit(f"apt fetched {len(found)} files for the package {package}")
        return found[0]
