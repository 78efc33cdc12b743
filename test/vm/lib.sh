# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# lib.sh: what fetch, run, go-test and selftest share: where the cache is, how the lock file is read,
# and how a kernel's name becomes a directory. Sourced, never run.

vm_dir=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
repo_root=$(cd "$vm_dir/../.." && pwd)
# Without symbolic links: the guest finds it below this machine's root, where an absolute one leads astray.
cache=$(readlink -m "${MUSTANG_VM_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/mustang/vm}")
lock=$vm_dir/kernels.lock

# Part of every tree's key: raise it when unpack() in fetch lays a tree out differently.
layout=1

# The lock group that holds QEMU and the guest's tools instead of a kernel.
tools_group=tools

# say MESSAGE: progress for people; die MESSAGE [STATUS]: one sentence and the end.
say() { printf '%s: %s\n' "${0##*/}" "$1" >&2; }
die() { say "$1"; exit "${2:-1}"; }

# usage: the script's own head comment, as its help.
usage() { sed -n '/^# usage:/,/^[^#]/ { /^#/ s/^# \{0,1\}//p }' "$0"; }

# option_words OPTION: how many words one of run's options takes; fails on anything else.
option_words() {
    case $1 in
    --icount | --no-share) echo 1 ;;
    --share | --timeout | --cpus | --mem | --console | --append) echo 2 ;;
    *) return 1 ;;
    esac
}

# lock_rows GROUP: the group's rows, "suite package version sha256".
lock_rows() { awk -v g="$1" '$1 == g { print $2, $3, $4, $5 }' "$lock"; }

# lock_groups: every kernel of the lock file, oldest first, "newest" last.
lock_groups() {
    awk -v t="$tools_group" '!/^#/ && NF == 5 && $1 != t { print $1 }' "$lock" | sort -uV
}

# tree_of GROUP: the directory that holds the group's packages unpacked. Its name follows from the
# packages' hashes, so a changed lock file can never meet a stale tree.
tree_of() {
    local key
    key=$({ echo "$layout"; lock_rows "$1" | awk '{ print $4 }' | sort; } | sha256sum)
    printf '%s/tree/%s-%s\n' "$cache" "$1" "${key:0:16}"
}

# kernel_group NAME: the group meant by NAME: its own name, or the start of its kernel's version.
kernel_group() {
    local group version
    for group in $(lock_groups); do
        version=$(lock_rows "$group" | awk '{ print $3; exit }')
        case $1 in
        "$group") echo "$group"; return ;;
        esac
        case $version in
        "$1"[.-]*) echo "$group"; return ;;
        esac
    done
    die "no kernel $1 in $lock; it has: $(lock_groups | tr '\n' ' ')(test/vm/fetch --update adds those it knows)" 2
}
