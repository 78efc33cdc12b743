/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Ports of the node itself that are no Service's, as far as this CPU has just
 * seen: most packets that come to a node are its own, and pay one look here
 * instead of four into the table of frontends.
 *
 * A new Service makes all of them void, by the number that its slots get before
 * it is in force. What was looked up in just that instant holds for NOBODY_LIFETIME.
 */
#pragma once

#include "common.h"
#include "fast.h"

#define NOBODY_LIFETIME 16 /* ticks: 16 to 160 ms */

/* Of all that is in force: what was kept before a change is void. */
inline_fn __u32 nobody_generation(void)
{
	__u32 zero = 0;
	struct meta *meta = bpf_map_lookup_elem(&mst_meta_v1, &zero);

	return meta ? meta->next_service * 0x9e3779b1u ^ meta->next_generation : 0;
}

inline_fn struct nobody *nobody_slot(const struct pkt *p)
{
	__u32 slot = (p->t.dport ^ p->t.dport >> 8 ^ p->proto) & (NOBODY_SLOTS - 1);

	return bpf_map_lookup_elem(&mst_nobody_v1, &slot);
}

/**
 * nobodys - whether a packet to the node is for no Service
 * @p: of a usual shape, as glance leaves it
 */
inline_fn bool nobodys(const struct pkt *p)
{
	struct nobody *n = nobody_slot(p);

	return n && n->port == p->t.dport && n->proto == p->proto && addr_equal(&n->addr, &p->t.dst) &&
	       (__s32)(n->until - now_ticks()) >= 0 && n->generation == nobody_generation();
}

/**
 * nobody_keep - the table of frontends was asked, and knows nobody of this port
 * @generation: as it was before
 */
inline_fn void nobody_keep(const struct pkt *p, __u32 generation)
{
	struct nobody *n = nobody_slot(p);

	if (!n)
		return;
	n->addr = p->t.dst;
	n->port = p->t.dport;
	n->proto = p->proto;
	n->generation = generation;
	n->until = now_ticks() + NOBODY_LIFETIME;
}
