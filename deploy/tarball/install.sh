#!/bin/sh
# Installs Culvert from the folder that this script is in, or takes it away again.
#
#   ./install.sh [--prefix DIR] [--root DIR]               installs, or upgrades what is there
#   ./install.sh --uninstall [--prefix DIR] [--root DIR]   removes the program; configuration, key and state stay
#
# DIR of --prefix is /usr/local unless given. --root installs into a folder that becomes a system later, and starts nothing
# there. With systemd or OpenRC there is a service culvert, enabled at the first installation; with OpenWrt's procd there is an
# init script with the configuration /etc/config/culvert. Running it twice changes nothing the second time.
set -eu
umask 022

here=$(cd "$(dirname "$0")" && pwd)
prefix=/usr/local root='' action=install

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
    --prefix | --root)
        [ $# -ge 2 ] || fail "$1 needs a folder"
        if [ "$1" = --prefix ]; then prefix=$2; else root=$2; fi
        shift
        ;;
    --uninstall) action=uninstall ;;
    *) fail "what is $1? (remedy: --prefix DIR, --root DIR, --uninstall)" ;;
    esac
    shift
done
case $prefix in
/*) prefix=${prefix%/} ;;
*) fail "--prefix $prefix is no absolute path (remedy: one that begins with /)" ;;
esac
root=${root%/}
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail 'only root may do this (remedy: sudo)'
if [ -e "$root/var/lib/dpkg/info/culvert.list" ]; then
    fail 'the Debian package is installed, and would get in the way (remedy: apt remove culvert; configuration and key stay)'
fi

# Where systemd looks: its own folders of /usr, or of /usr/local for any other prefix.
case $prefix in
/usr) lib=/usr/lib ;;
*) lib=/usr/local/lib ;;
esac
# What was installed, one path a line.
list=$root$prefix/share/culvert/installed

if [ -e "$root/etc/openwrt_release" ]; then
    manager=procd
elif [ -x "$root/sbin/openrc-run" ] && [ ! -d "$root/run/systemd/system" ] && [ ! -e "$root/lib/systemd/systemd" ]; then
    manager=openrc
elif [ -n "$root" ] || [ -d /run/systemd/system ]; then
    manager=systemd
else
    manager=none
fi
# Whether services run that can be asked: not in a folder.
live() { [ -z "$root" ] && [ "$manager" = "$1" ]; }

# put MODE FILE PATH: complete or not at all, also over a program that runs
put() {
    mkdir -p "$root${3%/*}"
    cp "$here/$2" "$root$3.new"
    chmod "$1" "$root$3.new"
    mv "$root$3.new" "$root$3"
    echo "$3" >>"$work"
}

# put_all FOLDER PATH: the files of a folder, without its folders
put_all() {
    for each in "$here/$1"/*; do
        [ -f "$each" ] || continue
        put 644 "$1/${each##*/}" "$2/${each##*/}"
    done
}

# take_away LIST: the files of a list, and folders that become empty
take_away() {
    while read -r path; do
        rm -f "$root$path"
        rmdir "$root${path%/*}" 2>/dev/null || true
    done <"$1"
}

install_files() {
    put 755 culvert "$prefix/bin/culvert"
    put 755 install.sh "$prefix/share/culvert/install.sh"
    if [ "$manager" != procd ]; then
        for page in "$here"/man/*; do
            put 644 "man/${page##*/}" "$prefix/share/man/man${page##*.}/${page##*/}"
        done
        put 644 completions/bash "$prefix/share/bash-completion/completions/culvert"
        put 644 completions/zsh "$prefix/share/zsh/site-functions/_culvert"
        put 644 completions/fish "$prefix/share/fish/vendor_completions.d/culvert.fish"
        put_all doc "$prefix/share/doc/culvert"
        put_all examples "$prefix/share/doc/culvert/examples"
        for folder in "$here"/examples/*/; do
            folder=${folder%/}
            put_all "examples/${folder##*/}" "$prefix/share/doc/culvert/examples/${folder##*/}"
        done
    else
        # What the licenses ask for; a router has no room for the rest.
        for each in LICENSE-MIT LICENSE-APACHE third-party-notices; do
            # Not of a program that was compiled here.
            [ -e "$here/doc/$each" ] || continue
            put 644 "doc/$each" "$prefix/share/doc/culvert/$each"
        done
    fi
    case $manager in
    systemd)
        put 644 systemd/culvert.service "$lib/systemd/system/culvert.service"
        sed -i "s|/usr/bin/culvert|$prefix/bin/culvert|; s|/usr/share/doc|$prefix/share/doc|" "$root$lib/systemd/system/culvert.service"
        put 644 systemd/culvert.sysusers "$lib/sysusers.d/culvert.conf"
        put 644 systemd/05-culvert.conf "$lib/sysctl.d/05-culvert.conf"
        ;;
    openrc)
        put 755 openrc/culvert /etc/init.d/culvert
        sed -i "s|:=/usr/bin/culvert}|:=$prefix/bin/culvert}|" "$root/etc/init.d/culvert"
        # Belongs to whoever administrates the host from then on; no list names it.
        if [ ! -e "$root/etc/conf.d/culvert" ]; then
            mkdir -p "$root/etc/conf.d"
            cp "$here/openrc/culvert.conf" "$root/etc/conf.d/culvert"
        fi
        ;;
    procd)
        put 755 openwrt/culvert.init /etc/init.d/culvert
        put 755 openwrt/culvert-uci "$prefix/share/culvert/culvert-uci"
        sed -i "s|^prefix=.*|prefix=$prefix|" "$root/etc/init.d/culvert"
        # Belongs to whoever administrates the router from then on; no list names it.
        if [ ! -e "$root/etc/config/culvert" ]; then
            mkdir -p "$root/etc/config"
            cp "$here/openwrt/culvert.config" "$root/etc/config/culvert"
            chmod 600 "$root/etc/config/culvert"
        fi
        ;;
    esac
}

# Raises the kernel's limits for socket buffers as the file says; a higher limit stays.
raise_limits() {
    for limit in rmem_max wmem_max; do
        ours=$(sed -n "s/^net\.core\.$limit = //p" "$here/systemd/05-culvert.conf")
        running=$(cat "/proc/sys/net/core/$limit" 2>/dev/null) || continue
        [ "$running" -ge "$ours" ] || echo "$ours" >"/proc/sys/net/core/$limit" || true
    done
}

# The service's user, where systemd-sysusers does not make it.
add_user() {
    if ! grep -q '^culvert:' /etc/group; then
        if command -v groupadd >/dev/null; then groupadd --system culvert; else addgroup -S culvert; fi
    fi
    grep -q '^culvert:' /etc/passwd && return
    if command -v useradd >/dev/null; then
        useradd --system --gid culvert --no-create-home --home-dir /var/lib/culvert --shell /usr/sbin/nologin culvert
    else
        adduser -S -D -H -h /var/lib/culvert -s /sbin/nologin -G culvert -g 'Culvert tunnel gateway' culvert
    fi
}

start_using() {
    [ -d "$root/etc/culvert" ] || install -d -m 0750 "$root/etc/culvert"
    if live systemd; then
        systemd-sysusers "$lib/sysusers.d/culvert.conf"
        [ "$(stat -c %G /etc/culvert)" != root ] || chgrp culvert /etc/culvert
        systemctl daemon-reload
        [ "$first" = no ] || systemctl enable culvert.service
        raise_limits
        systemctl try-restart culvert.service ||
            echo 'install.sh: the service does not start again: journalctl -u culvert says why' >&2
    elif live openrc; then
        add_user
        [ "$(stat -c %G /etc/culvert)" != root ] || chgrp culvert /etc/culvert
        raise_limits
        [ "$first" = no ] || rc-update add culvert default
        rc-service --ifstarted culvert restart ||
            echo 'install.sh: the service does not start again: /var/log/culvert.log says why' >&2
    elif live procd; then
        raise_limits
        [ "$first" = no ] || /etc/init.d/culvert enable
        /etc/init.d/culvert restart
    fi
}

if [ "$action" = uninstall ]; then
    if [ ! -e "$list" ]; then
        echo "install.sh: nothing is installed under $root$prefix" >&2
        exit 0
    fi
    if live systemd; then
        systemctl disable --now culvert.service || true
    elif live openrc; then
        rc-service --ifstarted culvert stop || true
        rc-update -a del culvert || true
    elif live procd; then
        /etc/init.d/culvert stop || true
        /etc/init.d/culvert disable || true
    fi
    take_away "$list"
    rm -f "$list"
    rmdir "${list%/*}" 2>/dev/null || true
    ! live systemd || systemctl daemon-reload
    echo "removed from $root$prefix; $root/etc/culvert, its key and $root/var/lib/culvert stay"
    exit 0
fi

[ -e "$here/culvert" ] || fail "there is no program in $here (remedy: run this script in the folder of the tarball)"
if [ -e "$list" ]; then first=no; else first=yes; fi
mkdir -p "${list%/*}"
work=$list.new
: >"$work"
install_files
sort -o "$work" "$work"
# Files of the version before that this one has no more.
if [ "$first" = no ]; then
    while read -r path; do
        grep -qxF "$path" "$work" || rm -f "$root$path"
    done <"$list"
fi
mv "$work" "$list"
start_using
case $manager in
systemd) next="culvert init, then systemctl start culvert" ;;
openrc) next="culvert init, then rc-service culvert start" ;;
procd) next="/etc/config/culvert, then /etc/init.d/culvert start" ;;
*) next="there is no systemd, so no service was installed: culvert init, then culvert run --config /etc/culvert/agent.toml" ;;
esac
echo "installed under $root$prefix; next: $next"
