/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Fragments: the first one names the ports, the others follow by the
 * datagram's identification (RFC 791, RFC 8200 4.5).
 */
#pragma once

#include "common.h"
#include "parse.h"

/**
 * frag_follow - give a fragment the ports of its datagram
 * @p: a fragment; a later one gets its ports from the first
 * @now: seconds
 *
 * Return: enum drop_reason.
 */
global_fn int frag_follow(struct pkt *p, __u32 now)
{
	struct frag_ports *found, ports = {};
	struct frag_key key = {};

	if (!p)
		return REASON_FRAG_NO_FIRST;
	key.src = p->t.src;
	key.dst = p->t.dst;
	key.id = p->frag_id;
	/* RFC 8200 4.5: what a later fragment names may be an option before the transport header. */
	key.proto = p->ipv6 ? 0 : p->proto;
	if (p->frag == FRAG_FIRST) {
		ports.sport = p->t.sport;
		ports.dport = p->t.dport;
		ports.proto = p->proto;
		ports.expires = now + FRAG_LIFETIME;
		bpf_map_update_elem(&mst_frags_v1, &key, &ports, BPF_ANY);
		return REASON_NONE;
	}
	found = bpf_map_lookup_elem(&mst_frags_v1, &key);
	if (!found || (__s32)(found->expires - now) < 0)
		return REASON_FRAG_NO_FIRST;
	p->t.sport = found->sport;
	p->t.dport = found->dport;
	p->proto = found->proto;
	return REASON_NONE;
}
