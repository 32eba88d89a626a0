#!/bin/sh
# Usage: chromium.sh. Sees that a Chromium is here for the tests of the page: Debian's package chromium, installed where that needs no password.
# Where that does not work it says in one line what is not tested, and ends well.
set -u
command -v chromium >/dev/null && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    install() { DEBIAN_FRONTEND=noninteractive apt-get -q install --no-install-recommends -y chromium; }
    { install || { apt-get -q update && install; }; } >/dev/null 2>&1
fi
command -v chromium >/dev/null || echo "The page is not tested in a browser: chromium is missing (Debian's package chromium; as root, make test installs it)."
