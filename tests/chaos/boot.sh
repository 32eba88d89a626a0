#!/bin/bash
# Runs systemd as process 1 of namespaces of its own, over a copy-on-write view of this machine with sparkd's units installed.
# Never touches the machine's own systemd, network or files: everything ends with the process that $1/pid names.
#
#   boot.sh SCRATCH CGROUP    SCRATCH: an empty folder; CGROUP: a new group below the cgroup2 mount. Needs root.
#   BOOT_ROOT=/folder         another root file system than this machine's: another release of systemd
set -euo pipefail
scratch=$1 cgroup=$2 lower=${BOOT_ROOT:-/}
deploy=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../deploy" && pwd)
stub=$(dirname "${BASH_SOURCE[0]}")/stub_service.py

mkdir -p "$cgroup"
echo $$ >"$cgroup/cgroup.procs"
export scratch deploy stub lower
# shellcheck disable=SC2016  # the inner shell expands
exec unshare --mount --pid --fork --uts --ipc --net --cgroup --propagation private bash -c '
set -euo pipefail
root=$scratch/root
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch/upper" "$scratch/work" "$root"
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root"/dev/{shm,pts,mqueue,hugepages}
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance devpts "$root/dev/pts"
ln -s /proc/self/fd "$root/dev/fd"
ln -s pts/ptmx "$root/dev/ptmx"
ip link set lo up

rm -rf "$root"/{opt/sparkd,etc/sparkd,var/lib/sparkd,var/log/sparkd,var/log/journal}
make --silent -C "$deploy" install "DESTDIR=$root"
install -D -m 755 "$stub" "$root/opt/sparkd/bin/sparkd"
install -D -m 644 -t "$root/opt/sparkd/src/sparkd" "$deploy"/../sparkd/{__init__,errors,systemd}.py
echo sk-admin-of-the-boot-test >"$root/etc/sparkd/admin.key"
chroot "$root" systemd-sysusers sparkd.conf
chroot "$root" systemd-tmpfiles --create --remove --boot sparkd.conf
printf "[Unit]\nDescription=boot test\n" >"$root/etc/systemd/system/boot-test.target"

mkdir -p "$root/old"
cd "$root"
pivot_root . old
umount -l /old
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd \
    --unit=boot-test.target --log-target=journal --show-status=0
'
