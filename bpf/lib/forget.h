/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A flow's generation: by moving it, whoever changes the flow's entry makes void what is kept of it (fast.h). */
#pragma once

#include "common.h"

/* Of both directions of a flow the same: @a and @b are the last words of both addresses. */
inline_fn __u32 fast_hash(__be32 a, __be32 b, __be16 port_a, __be16 port_b)
{
	__u32 mixed = a ^ b ^ ((__u32)(port_a ^ port_b) << 8);

	return mixed * 0x9e3779b1u >> 22;
}
_Static_assert(FAST_SLOTS == 1 << 10, "fast_hash gives 10 bits");

/* A flow's part of the generation under which something is kept of it. */
inline_fn __u32 fast_mix(__u32 count)
{
	return count * 0x9e3779b1u;
}

/**
 * fast_forget_here - after an entry of this tuple, in either direction, came, went or changed its meaning
 *
 * Return: what changes with it in the generation that a packet had read before, when no other CPU was
 * in between: with that, what is kept from now on holds.
 */
inline_fn __u32 fast_forget_here(__be32 a, __be32 b, __be16 port_a, __be16 port_b)
{
	__u32 hash = fast_hash(a, b, port_a, port_b);
	__u32 *count = bpf_map_lookup_elem(&mst_fast_generations_v1, &hash), was;

	if (!count)
		return 0;
	was = __sync_fetch_and_add(count, 1); /* several CPUs may be at flows of one hash: none may be lost */
	return fast_mix(was) ^ fast_mix(was + 1);
}

/* The same as a function, where the stack has room for one more. */
slow_fn __u32 fast_forget(__be32 a, __be32 b, __be16 port_a, __be16 port_b)
{
	return fast_forget_here(a, b, port_a, port_b);
}
