#!/bin/sh
# Usage: promtool.sh FILE. Puts promtool, which the tests of deploy/observability need, into FILE, out of Debian's package prometheus.
# Installs no package and starts no service. Where that does not work it says in one line what is not tested, and ends well.
set -u
command -v promtool >/dev/null && exit 0
[ -x "$1" ] && exit 0
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"  # apt fetches as a user of its own
download() { (cd "$folder" && apt-get -q download prometheus); }
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
    {
        download || { [ "$(id -u)" = 0 ] && apt-get -q update && download; }
        dpkg-deb --extract "$folder"/prometheus_*.deb "$folder" && "$folder/usr/bin/promtool" --version && mv "$folder/usr/bin/promtool" "$1"
    } >"$folder/log" 2>&1
fi
[ -x "$1" ] || echo "The alert rules are not tested: promtool is missing (Debian's package prometheus has it)."
