/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Fragments: the first one names the ports, the others follow by the
 * datagram's identification (RFC 791, RFC 8200 4.5). One that comes to the NIC
 * before its first is left to the node's stack, and with it all of the datagram
 * that are still to come: the stack puts it together, and sends it on in order.
 * To an address that has Services, which the stack would take for its own or know
 * no way to, it carries a mark: a rule takes the whole datagram to a device that
 * leads nowhere (internal/node/gather.go), which cuts it again, and the program at
 * that device's egress sends the pieces to where they came in.
 *
 * A note that fragments went to the stack is short-lived: one whose first has not
 * come by then is lost or nobody's, and may not lead a later datagram of the same
 * identification there, whose fragments need no stack.
 */
#pragma once

#include "common.h"
#include "parse.h"

/**
 * frag_follow - give a fragment the ports of its datagram
 * @p: a fragment; a later one gets its ports from the first
 * @now: seconds
 * @overtaken: a first one may find that others have gone to the stack before it
 *
 * Return: enum drop_reason; REASON_FRAG_NO_FIRST also for a first one that others have overtaken.
 */
global_fn int frag_follow(struct pkt *p, __u32 now, bool overtaken)
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
	found = bpf_map_lookup_elem(&mst_frags_v1, &key);
	if (found && (__s32)(found->expires - now) < 0)
		found = NULL;
	if (p->frag == FRAG_FIRST && !(overtaken && found && found->by_stack)) {
		ports.sport = p->t.sport;
		ports.dport = p->t.dport;
		ports.proto = p->proto;
		ports.expires = now + FRAG_LIFETIME;
		bpf_map_update_elem(&mst_frags_v1, &key, &ports, BPF_ANY);
		return REASON_NONE;
	}
	if (!found || found->by_stack)
		return REASON_FRAG_NO_FIRST;
	p->t.sport = found->sport;
	p->t.dport = found->dport;
	p->proto = found->proto;
	return REASON_NONE;
}

/* At the NIC: the rest of the datagram follows this fragment to the node's stack. */
slow_fn int frag_by_stack(const struct pkt *p, __u32 now)
{
	struct frag_ports note = { .expires = now + FRAG_BY_STACK_LIFETIME, .by_stack = 1 };
	struct frag_key key = { .src = p->t.src, .dst = p->t.dst, .id = p->frag_id };

	key.proto = p->ipv6 ? 0 : p->proto;
	return bpf_map_update_elem(&mst_frags_v1, &key, &note, BPF_ANY);
}
