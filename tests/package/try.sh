#!/bin/sh
# Run by scripts/package --try in a fresh Debian, with the packages in /tmp: installs them, uses them, removes them.
set -eu
cd /tmp
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
find / -xdev -type f | sort >/tmp/before.txt
apt-get -qq install -y --no-install-recommends ./llmrun_*.deb >/tmp/apt.log 2>&1 || { tail /tmp/apt.log; exit 1; }
echo "installed $(dpkg-query -W -f '${Package} ${Version} ${Installed-Size} kB' llmrun)"

llmrun --version
llmrun /tmp/hello.lua
llmrun inspect --help | head -n 1
if llmrun run -m /none.gguf -p x 2>/tmp/err; then exit 1; fi
cat /tmp/err
zcat /usr/share/man/man1/llmrun.1.gz | head -n 1
ls /usr/share/bash-completion/completions/llmrun /usr/share/zsh/vendor-completions/_llmrun \
    /usr/share/fish/vendor_completions.d/llmrun.fish /usr/share/llmrun/library/llmrun.lua

apt-get -qq install -y --no-install-recommends lua5.4 >/tmp/apt.log 2>&1 || { tail /tmp/apt.log; exit 1; }
echo "stock: $(lua5.4 /tmp/module.lua)"

# plugins are found where their packages put them
for p in ./llmrun-*.deb; do
    [ -e "$p" ] || continue
    apt-get -qq install -y --no-install-recommends "$p" >/tmp/apt.log 2>&1 || { tail /tmp/apt.log; exit 1; }
    echo "installed $p"
done
if [ -e /usr/lib/*/llmrun/libllmrun_mpi.so ]; then
    apt-get -qq install -y --no-install-recommends openmpi-bin >/tmp/apt.log 2>&1 || { tail /tmp/apt.log; exit 1; }
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 llmrun --tp 2 /tmp/ranks.lua
fi

apt-get -qq install -y --no-install-recommends ./libllmrun*.deb gcc libc6-dev pkg-config >/tmp/apt.log 2>&1 ||
    { tail /tmp/apt.log; exit 1; }
gcc -Wall -Werror -o /tmp/use /tmp/use.c $(pkg-config --cflags --libs llmrun)
/tmp/use

apt-get -qq purge -y 'llmrun*' 'libllmrun*' >/tmp/apt.log 2>&1
left=$(find / -xdev -name '*llmrun*' -not -path '/tmp/*' -not -path '/var/log/*' -not -path '/var/cache/*' -not -path '/proc/*')
[ -z "$left" ] || { echo "left behind: $left"; exit 1; }
echo "removed, nothing left"
