# What the scripts that make packages share. They source it from the root of the repository.
# shellcheck shell=bash

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "${0##*/deploy/}: $*"
    exit 1
}

# The version of Cargo.toml, which the changelog of the package must have too.
cargo_version() {
    local version
    version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
    [[ -n $version ]] || fail 'Cargo.toml names no version (remedy: version under [workspace.package])'
    printf '%s\n' "$version"
}

# machine PROGRAM: what CPU it is for, as rustc names it
machine() {
    case $(od -An -tx1 -j18 -N2 "$1" | tr -d ' ') in
    3e00) echo x86_64 ;;
    b700) echo aarch64 ;;
    *) fail "$1 is for another CPU than x86_64 and aarch64" ;;
    esac
}

# tell PROGRAM ARGUMENT...: runs it, under an emulator where it is for another CPU than this machine's
tell() {
    local cpu emulator
    cpu=$(machine "$1")
    if [[ $cpu == "$(uname -m)" ]]; then
        "$@"
        return
    fi
    for emulator in "qemu-$cpu-static" "qemu-$cpu" "${CULVERT_TOOLCHAIN:-}/usr/bin/qemu-$cpu-static"; do
        if command -v "$emulator" >/dev/null; then
            # Where Debian has the C library of another CPU.
            QEMU_LD_PREFIX=${QEMU_LD_PREFIX:-${CULVERT_TOOLCHAIN:-}/usr/$cpu-linux-gnu} "$emulator" "$@"
            return
        fi
    done
    fail "nothing here runs a program for $cpu (remedy: apt-get install qemu-user-static, or deploy/toolchain)"
}

# without_symbols PROGRAM FILE: a copy without what only a debugger reads
without_symbols() {
    install -D -m 0755 "$1" "$2"
    # Read to its end: a grep that stops early would end readelf by a signal, which looks like a program without symbols.
    [[ $(readelf --wide --section-headers "$2") == *' .symtab '* ]] || return 0
    [[ $(machine "$1") == "$(uname -m)" ]] || fail "$1 has symbols, and no tool here removes those of another CPU (remedy: deploy/build)"
    strip --strip-unneeded --remove-section=.comment --remove-section=.note "$2"
}

# is_hardened PROGRAM: the kernel chooses its addresses, nothing that can be written can be executed, and what the loader
# relocates is read-only before the program begins.
is_hardened() {
    local elf why=''
    elf=$(readelf --wide --file-header --program-headers --dynamic "$1") || fail "$1 cannot be read"
    grep -Eq 'Type: +DYN' <<<"$elf" || why+=', it has a fixed address'
    grep -q GNU_RELRO <<<"$elf" || why+=', its relocations stay writable (RELRO)'
    grep -Eq 'BIND_NOW|Flags:.* NOW' <<<"$elf" || why+=', it is linked lazily (NOW)'
    grep -Eq 'GNU_STACK .* RW +(0x)?[0-9a-f]+$' <<<"$elf" || why+=', its stack is executable'
    ! grep -Eq ' LOAD .* RWE +0x' <<<"$elf" || why+=', it has memory that is writable and executable'
    ! grep -q TEXTREL <<<"$elf" || why+=', its code is relocated (TEXTREL)'
    [[ -z $why ]] || fail "$1 lacks a defence: ${why#, }"
}

# pages PROGRAM FOLDER: the manual pages (man/) and completions (completions/) that the program itself writes
pages() {
    local shell
    mkdir -p "$2/completions"
    tell "$1" manual --out "$2/man" >/dev/null
    for shell in bash zsh fish; do
        tell "$1" completions "$shell" >"$2/completions/$shell"
    done
}

# lay_out PROGRAM FOLDER: what install.sh of the tarball installs, and with notices and SBOM beside it what a package has
lay_out() {
    install -d "$2"/{systemd,openrc,openwrt,doc}
    without_symbols "$1" "$2/culvert"
    install -m 0755 deploy/tarball/install.sh "$2"
    install -m 0644 deploy/systemd/* "$2/systemd"
    install -m 0644 deploy/openrc/* "$2/openrc"
    install -m 0755 deploy/openwrt/{culvert.init,culvert-uci} "$2/openwrt"
    install -m 0644 deploy/openwrt/culvert.config "$2/openwrt"
    pages "$1" "$2"
    chmod 0644 "$2"/man/* "$2"/completions/*
    install -m 0644 "${documents[@]}" LICENSE-MIT LICENSE-APACHE "$2/doc"
    deploy/flat-documents "$2/doc"
    examples "$2/examples"
}

# papers TARGET FOLDER: notices and SBOM of what lay_out has put into FOLDER
papers() {
    deploy/notices "$1" "$2/culvert" >"$2/doc/third-party-notices"
    deploy/sbom --target "$1" --binary "$2/culvert" >"$2/doc/sbom.cdx.json"
}

# commit_time: SOURCE_DATE_EPOCH, or the time of the commit
commit_time() {
    printf '%s\n' "${SOURCE_DATE_EPOCH:-$(git show --no-patch --format=%ct HEAD 2>/dev/null)}" | grep . ||
        fail 'this is no clone, so that no commit has a time (remedy: SOURCE_DATE_EPOCH=SECONDS, as of git show -s --format=%ct)'
}

# examples FOLDER: configurations to begin with: of agents; and in folders those of the programs beside them, routing daemons with
# the agents that belong to them.
examples() {
    local folder
    install -D -m 0644 -t "$1" config/*.toml
    for folder in babel bird certbot frr grafana nftables prometheus; do
        install -D -m 0644 -t "$1/$folder" deploy/$folder/*
    done
}

# What a package has beside the program, for whoever runs it.
documents=(README.md CHANGELOG.md SECURITY.md
    docs/{operations,configuration,metrics,status,page,doctor,qlog,bench,security,reliability,uplinks,carrier,scale,performance,probes}.md)
