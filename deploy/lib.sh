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
    readelf --wide --section-headers "$2" | grep -q ' \.symtab ' || return 0
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

# papers PROGRAM TARGET FOLDER: what belongs to a program in any package. man/, completions/, notices.
# The program says its manual pages and completions.
papers() {
    local shell
    mkdir -p "$3/completions"
    tell "$1" manual --out "$3/man" >/dev/null
    for shell in bash zsh fish; do
        tell "$1" completions "$shell" >"$3/completions/$shell"
    done
    deploy/notices "$2" "$1" >"$3/notices"
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
documents=(README.md CHANGELOG.md docs/{operations,configuration,metrics,status,page,doctor,qlog,bench,security}.md)
