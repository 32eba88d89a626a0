#!/bin/sh
# Installs, checks and removes the systemd side of sparkd. Never touches the Python environment, models, state or keys.
#
#   PREFIX=/usr/local VENV=/opt/sparkd DESTDIR= ./install.sh install | uninstall | check
#
# VENV is the Python environment that holds sparkd; PREFIX and VENV are written into the units.
# With DESTDIR it only lays files below that folder, for packages and tests: no root needed, nothing of the running system is called.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
PREFIX=${PREFIX:-/usr/local}
VENV=${VENV:-/opt/sparkd}
DESTDIR=${DESTDIR:-}
etc=$DESTDIR/etc/sparkd
bin=$DESTDIR$PREFIX/bin
lib=$DESTDIR$PREFIX/lib
libexec=$DESTDIR$PREFIX/libexec
share=$DESTDIR$PREFIX/share/sparkd
units='sparkd.service sparkd.socket sparkd-ray.service sparkd-dropcache.socket sparkd-dropcache@.service'
# File in completions/, and where its shell looks for it below PREFIX/share.
completions='sparkd.bash:bash-completion/completions/sparkd _sparkd:zsh/site-functions/_sparkd sparkd.fish:fish/vendor_completions.d/sparkd.fish'
samples='README.md nftables.conf sparkd.service.d/relax.conf.example sparkd.service.d/systemd-255.conf.example
    sparkd-ray.service.d/relax.conf.example'
reference=$here/../configs/sparkd.yaml
# The engine and the versions that `make serve` installs on a machine with a GPU.
environment="python3 -m venv $VENV && $VENV/bin/pip install . vllm==0.33.0 -c deploy/constraints.txt"

die() {
    echo "install.sh: $1" >&2
    exit 1
}

install_all() {
    [ -f "$reference" ] || die "$reference is missing: run this from a complete checkout of sparkd."
    install -d -m 755 "$etc" "$bin" "$lib/systemd/system" "$lib/sysusers.d" "$lib/tmpfiles.d" "$libexec" \
        "$share/sparkd.service.d" "$share/sparkd-ray.service.d"
    for unit in $units; do
        sed -e "s|/usr/local/|$PREFIX/|g" -e "s|/opt/sparkd/|$VENV/|g" "$here/$unit" >"$lib/systemd/system/$unit"
        chmod 644 "$lib/systemd/system/$unit"
    done
    install -m 644 "$here/sysusers.d/sparkd.conf" "$lib/sysusers.d/sparkd.conf"
    install -m 644 "$here/tmpfiles.d/sparkd.conf" "$lib/tmpfiles.d/sparkd.conf"
    install -m 755 "$here/sparkd-dropcache" "$libexec/sparkd-dropcache"
    # sudo and ssh look there. A program that somebody else put there stays.
    [ -e "$bin/sparkd" ] && [ ! -L "$bin/sparkd" ] || ln -sfn "$VENV/bin/sparkd" "$bin/sparkd"
    for sample in $samples; do
        install -m 644 "$here/$sample" "$share/$sample"
    done
    for completion in $completions; do
        install -D -m 644 "$here/completions/${completion%%:*}" "$DESTDIR$PREFIX/share/${completion#*:}"
    done
    install -m 644 "$reference" "$share/sparkd.yaml"
    # The operator's file: made once, never overwritten.
    [ -e "$etc/sparkd.yaml" ] || install -m 640 "$reference" "$etc/sparkd.yaml"
    [ -n "$DESTDIR" ] || activate
}

activate() {
    systemd-sysusers "$lib/sysusers.d/sparkd.conf"
    systemd-tmpfiles --create "$lib/tmpfiles.d/sparkd.conf"
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
    cat <<TEXT
Installed. What is left:
  $environment     as root, from the checkout
  \$EDITOR $etc/sparkd.yaml && sparkd check $etc/sparkd.yaml
  make -C deploy check
  systemctl enable --now sparkd.socket sparkd.service             a node that only lends its GPU: sudo -u sparkd sparkd join HEAD instead
TEXT
}

uninstall_all() {
    if [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; then
        for unit in sparkd.service sparkd.socket sparkd-ray.service sparkd-dropcache.socket; do
            ! systemctl --quiet is-active "$unit" ||
                die "$unit is active. First: sparkd unload --all; systemctl disable --now sparkd.socket sparkd.service sparkd-ray.service sparkd-dropcache.socket"
        done
    fi
    for unit in $units; do
        rm -f "$lib/systemd/system/$unit"
    done
    rm -f "$lib/sysusers.d/sparkd.conf" "$lib/tmpfiles.d/sparkd.conf" "$libexec/sparkd-dropcache"
    [ "$(readlink "$bin/sparkd")" != "$VENV/bin/sparkd" ] || rm -f "$bin/sparkd"
    if [ -f "$share/sparkd.yaml" ] && cmp -s "$share/sparkd.yaml" "$etc/sparkd.yaml"; then
        rm -f "$etc/sparkd.yaml"
    fi
    for sample in $samples sparkd.yaml; do
        rm -f "$share/$sample"
    done
    for completion in $completions; do
        rm -f "$DESTDIR$PREFIX/share/${completion#*:}"
    done
    for folder in "$share/sparkd.service.d" "$share/sparkd-ray.service.d" "$share" "$etc"; do
        [ ! -d "$folder" ] || rmdir --ignore-fail-on-non-empty "$folder"
    done
    [ -n "$DESTDIR" ] || removed
}

removed() {
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
    echo "Removed. Left alone: the user sparkd, /var/lib/sparkd, /var/lib/sparkd-tmp, /var/log/sparkd, $VENV, and in $etc what you changed or added."
}

# Says every problem in a line of its own; exit 1 if there is one.
check_all() {
    problems=0
    version=$(systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge 252 ] || problem "systemd ${version:-is missing}: 252 or newer is needed."
    [ -x "$DESTDIR$VENV/bin/sparkd" ] || problem "$VENV/bin/sparkd is missing: $environment"
    [ "$(readlink "$bin/sparkd")" = "$VENV/bin/sparkd" ] || problem "$bin/sparkd is no link to $VENV/bin/sparkd: make -C deploy install"
    for path in "$DESTDIR$VENV" "$libexec/sparkd-dropcache"; do
        [ ! -e "$path" ] || owned_by_root "$path" ||
            problem "$path can be changed by somebody else than root: chown -R root:root $path && chmod -R go-w $path"
    done
    for unit in $units; do
        [ -f "$lib/systemd/system/$unit" ] || problem "$lib/systemd/system/$unit is missing: make -C deploy install"
    done
    [ -f "$etc/sparkd.yaml" ] || problem "$etc/sparkd.yaml is missing: make -C deploy install"
    for key in "$etc"/*.key "$etc"/*.token; do
        [ ! -e "$key" ] || [ -z "$(find "$key" -perm /077)" ] || problem "$key can be read by others: chmod 600 $key"
    done
    [ -n "$DESTDIR" ] || getent passwd sparkd >/dev/null || problem "There is no user sparkd: systemd-sysusers"
    [ "$problems" = 0 ] || exit 1
    echo "No problem found."
}

problem() {
    echo "$1"
    problems=$((problems + 1))
}

# $1 and, for a folder, what lies directly in its bin.
owned_by_root() {
    [ -z "$(find "$1" "$1/bin" -maxdepth 1 \( ! -user root -o -perm /022 \) ! -type l 2>/dev/null)" ]
}

for path in "$PREFIX" "$VENV" "${DESTDIR:-/}"; do
    case "$path" in
    *[!A-Za-z0-9/._+-]*) die "'$path' cannot stand in a unit file: use letters, digits and /._+- only." ;;
    /*) ;;
    *) die "'$path' is not an absolute path." ;;
    esac
done
if [ "${1:-}" != check ] && [ -z "$DESTDIR" ] && [ "$(id -u)" != 0 ]; then
    die "root is needed to change the system. Use sudo, or DESTDIR=/some/folder to see what it would lay down."
fi
case "${1:-}" in
install) install_all ;;
uninstall) uninstall_all ;;
check) check_all ;;
*) die "usage: PREFIX=/usr/local VENV=/opt/sparkd DESTDIR= $0 install | uninstall | check" ;;
esac
