/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Fragments: the first one names the ports, the others follow by the
 * datagram's identification (RFC 791, RFC 8200 4.5). A program cannot hold one
 * that overtook its first, so it goes, and with it all of its datagram that are
 * still to come, to a network namespace that does nothing but put datagrams
 * together and send them back in pieces of the same size, in order
 * (internal/node/gather.go). Back at that namespace's device, from_gather lets
 * them come in again where they did: at the ingress of a device, or as packets
 * that the host's stack routes. IPv6's have another identification then, so a
 * note of where that is goes by the two addresses alone.
 *
 * A note that fragments are gathered is short-lived: one whose first has not
 * come by then is lost or nobody's, and may not lead a later datagram of the same
 * identification there, whose fragments need no gathering.
 */
#pragma once

#include "common.h"
#include "parse.h"

/* Both ends of the gathering device have it. */
#define GATHER_MAC { 0x02, 0x6d, 0x73, 0x74, 0, 2 }

inline_fn void frag_key_of(struct frag_key *key, const struct pkt *p)
{
	key->src = p->t.src;
	key->dst = p->t.dst;
	key->id = p->frag_id;
	/* RFC 8200 4.5: what a later fragment names may be an option before the transport header. */
	key->proto = p->ipv6 ? 0 : p->proto;
}

inline_fn void frag_pair_of(struct frag_key *key, const struct pkt *p)
{
	key->src = p->t.src;
	key->dst = p->t.dst;
	key->id = 0;
	key->proto = FRAG_PAIR;
}

inline_fn bool frag_is_old(const struct frag_ports *note, __u32 now)
{
	return (__s32)(note->expires - now) < 0;
}

/**
 * frag_follow - give a fragment the ports of its datagram
 * @p: a fragment; a later one gets its ports from the first
 * @now: seconds
 * @overtaken: a first one may find that others are being gathered
 *
 * Return: enum drop_reason; REASON_FRAG_NO_FIRST also for a first one that others have overtaken.
 */
global_fn int frag_follow(struct pkt *p, __u32 now, bool overtaken)
{
	struct frag_ports *found, ports = {};
	struct frag_key key = {};

	if (!p)
		return REASON_FRAG_NO_FIRST;
	frag_key_of(&key, p);
	found = bpf_map_lookup_elem(&mst_frags_v1, &key);
	if (found && frag_is_old(found, now))
		found = NULL;
	if (p->frag == FRAG_FIRST && !(overtaken && found && found->gathered)) {
		ports.sport = p->t.sport;
		ports.dport = p->t.dport;
		ports.proto = p->proto;
		ports.expires = now + FRAG_LIFETIME;
		bpf_map_update_elem(&mst_frags_v1, &key, &ports, BPF_ANY);
		return REASON_NONE;
	}
	if (!found || found->gathered)
		return REASON_FRAG_NO_FIRST;
	p->t.sport = found->sport;
	p->t.dport = found->dport;
	p->proto = found->proto;
	return REASON_NONE;
}

inline_fn bool frag_gathers(void)
{
	struct node_config *n = node_config();

	return n && n->gather;
}

/**
 * frag_gather - send a fragment to where datagrams are put together
 * @back: ifindex of where the datagram is to come in again; 0: as a packet that the host's stack routes
 *
 * The rest of its datagram follows.
 *
 * Return: a tc verdict; NEXT where nothing gathers.
 */
slow_fn int frag_gather(struct __sk_buff *skb, const struct pkt *p, __u32 now, __u32 back)
{
	struct frag_ports note = { .expires = now + FRAG_GATHERED_LIFETIME, .gathered = 1 };
	struct frag_ports pair = { .expires = now + FRAG_LIFETIME, .back = back };
	struct node_config *n = node_config();
	__u8 mac[6] = GATHER_MAC;
	struct frag_key key = {};

	if (!n || !n->gather || !p || back != pair.back)
		return NEXT;
	frag_pair_of(&key, p);
	if (bpf_map_update_elem(&mst_frags_v1, &key, &pair, BPF_ANY))
		return NEXT;
	frag_key_of(&key, p);
	if (bpf_map_update_elem(&mst_frags_v1, &key, &note, BPF_ANY) || bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0))
		return NEXT;
	return bpf_redirect(n->gather, 0);
}
