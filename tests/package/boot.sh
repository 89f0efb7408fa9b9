# The first process of a machine: mounts what is its own, then becomes its init. `machine.rs` starts it in namespaces of
# its own.
#
#   boot.sh FOLDER LOWER CGROUP INIT...
#
# FOLDER has the folders upper, layer and root; LOWER is the clean Debian, or / for this host's own system. What is in
# upper is put over it.
set -eu
folder=$1 lower=$2 cgroup=$3
shift 3
root=$folder/root

# A control group of its own: in the namespace that comes next it is the top.
if [ "$cgroup" != entered ]; then
    mount -t cgroup2 cgroup2 "$root"
    mkdir "$root/$cgroup"
    echo 0 >"$root/$cgroup/cgroup.procs"
    umount "$root"
    exec unshare --cgroup -- sh "$0" "$folder" "$lower" entered "$@"
fi

# In memory: the folder may be on an overlay itself, as it is in a container, and an overlay takes none as its upper one.
mount -t tmpfs -o mode=755 layer "$folder/layer"
mkdir "$folder/layer/upper" "$folder/layer/work"
mount -t overlay -o "lowerdir=$lower,upperdir=$folder/layer/upper,workdir=$folder/layer/work" overlay "$root"
if [ "$lower" = / ]; then
    # Of this host stays what every Debian has: no services but systemd's own, no mounts, and nothing of ours. All of
    # it happens in the overlay.
    mount -t tmpfs -o mode=1777 tmp "$root/tmp"
    mount -t tmpfs -o mode=1777 tmp "$root/var/tmp"
    rm -rf "$root/etc/systemd/system" "$root"/etc/rc?.d "$root/etc/init.d" "$root/usr/sbin/policy-rc.d"
    mkdir "$root/etc/systemd/system"
    : >"$root/etc/fstab"
    # Without a number of its own, systemd would enable all services again.
    tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
    if [ -e "$root/var/lib/dpkg/info/culvert.list" ]; then
        chroot "$root" dpkg --purge --force-all culvert
    fi
    rm -rf "$root/etc/culvert" "$root/var/lib/culvert" "$root/usr/bin/culvert" "$root/usr/local/bin/culvert" \
        "$root"/lib/systemd/system/culvert.service* "$root/usr/lib/sysusers.d/culvert.conf"
    sed -i '/^culvert:/d' "$root/etc/passwd" "$root/etc/group" "$root/etc/shadow" "$root/etc/gshadow"
fi
cp -a "$folder/upper/." "$root/"
mount -t proc proc "$root/proc"
# As containers have it: the kernel's parameters are the host's, those of the network are the namespace's.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount --bind "$root/proc/sys/net" "$root/proc/sys/net"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 dev "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/net"
mknod -m 666 "$root/dev/null" c 1 3
mknod -m 666 "$root/dev/zero" c 1 5
mknod -m 666 "$root/dev/full" c 1 7
mknod -m 666 "$root/dev/random" c 1 8
mknod -m 666 "$root/dev/urandom" c 1 9
mknod -m 666 "$root/dev/tty" c 5 0
# As udev has it on most machines.
mknod -m 666 "$root/dev/net/tun" c 10 200
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=755 run "$root/run"

cd "$root"
mkdir -p mnt
pivot_root . mnt
umount -l /mnt
# systemd's credentials come to a service by propagation.
mount --make-rshared /
# Root of this machine only: the clock, the modules and the power are the host's.
exec setpriv --bounding-set=-sys_module,-sys_rawio,-sys_time,-sys_boot -- \
    env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
