/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Keeps compiled objects the same bytes everywhere. clang 16 writes the types that only __sk_buff points at in
 * the order of their addresses in the compiler's memory, which changes with the path of the sources. There are
 * two: the function names one of them before. Nobody calls it, so it is never loaded.
 */
#pragma once

#include <linux/bpf.h>

__attribute__((used)) static int sk_buff_types(struct bpf_flow_keys *keys)
{
	return keys != 0;
}
