/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A port of the node's for a flow that wears its address: one of those that the
 * host leaves alone (edge_config), that no other flow between the same ends and no
 * socket of the host has. A pod's flow may have one of some more, which the host does
 * not leave alone: each is marked with the first flow that has it, as a frontend's
 * is, so that the NIC looks at what comes to it.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "parse.h"

/* The flags of an address that has frontends or is the node's own. */
inline_fn __u16 address_flags(const struct addr *a)
{
	struct service_key key = { .addr = *a };
	struct service *mark = grown_find(&mst_services_v2_now, &key);

	return mark ? mark->flags : 0;
}

/**
 * host_socket - the host's socket that a packet reaches
 * @t: its tuple; of what is answered, with @answer, the answer's is the other way round
 *
 * Return: its state (BPF_TCP_*), of UDP ESTABLISHED when it is connected, else CLOSE; 0: none, or SCTP's, which no helper finds.
 */
global_fn int host_socket(struct __sk_buff *skb, const struct tuple *t, const struct pkt *p, bool answer)
{
	struct bpf_sock_tuple to = {};
	__u32 size = sizeof(to.ipv6);
	const struct addr *from, *at;
	struct bpf_sock *sk;
	int state;

	if (!t || !p || (p->proto != IPPROTO_TCP && p->proto != IPPROTO_UDP))
		return 0;
	from = answer ? &t->dst : &t->src;
	at = answer ? &t->src : &t->dst;
	if (p->ipv6) {
		__builtin_memcpy(to.ipv6.saddr, from, sizeof(to.ipv6.saddr));
		__builtin_memcpy(to.ipv6.daddr, at, sizeof(to.ipv6.daddr));
		to.ipv6.sport = answer ? t->dport : t->sport;
		to.ipv6.dport = answer ? t->sport : t->dport;
	} else {
		to.ipv4.saddr = from->words[3];
		to.ipv4.daddr = at->words[3];
		to.ipv4.sport = answer ? t->dport : t->sport;
		to.ipv4.dport = answer ? t->sport : t->dport;
		size = sizeof(to.ipv4);
	}
	if (p->proto == IPPROTO_TCP) {
		sk = bpf_skc_lookup_tcp(skb, &to, size, BPF_F_CURRENT_NETNS, 0);
		state = sk ? sk->state : 0;
		opaque(state); /* to the verifier they are of two kinds, which no instruction reads both of */
	} else {
		sk = bpf_sk_lookup_udp(skb, &to, size, BPF_F_CURRENT_NETNS, 0);
		state = sk ? sk->state : 0;
	}
	if (sk)
		bpf_sk_release(sk);
	return state;
}

/* Whether a socket of the host has the port, so that a flow on it would be taken for the socket's. */
inline_fn bool host_has_port(struct __sk_buff *skb, const struct tuple *t, const struct pkt *p)
{
	return host_socket(skb, t, p, true);
}

/* Whether a tuple is a connection's that the host has. One that lingers gives way. */
inline_fn bool host_connected(struct __sk_buff *skb, const struct tuple *t, const struct pkt *p)
{
	int state = host_socket(skb, t, p, false);

	return state && state != BPF_TCP_LISTEN && state != BPF_TCP_TIME_WAIT && state != BPF_TCP_CLOSE;
}

/* The port that a flow wears when nobody else has it, as an offset: the same for a tuple that comes again, whose
 * dead entry then takes it in, and the next one for a client's next port. As hard to guess as the client's. */
inline_fn __u32 wear_first_port(const struct pkt *p)
{
	__u32 ends = p->t.src.words[0] ^ p->t.src.words[1] ^ p->t.src.words[2] ^ p->t.src.words[3] ^ p->t.dst.words[3];

	return (ends * 0x9e3779b1u >> 16) + p->t.dport + bpf_ntohs(p->t.sport);
}

/* @offset: any number. Return: a port of the range. */
inline_fn __be16 wear_port(const struct edge_config *c, __u32 offset)
{
	return bpf_htons(c->port_first + offset % (c->port_count ? c->port_count : 1));
}

/* Whether flows may wear a port beside those of the range. */
inline_fn bool worn_more(__be16 port)
{
	return (__u16)(bpf_ntohs(port) - WORN_MORE_FIRST) < WORN_MORE_COUNT;
}

/* @offset: any number. Return: one of those. */
inline_fn __be16 wear_more(__u32 offset)
{
	return bpf_htons(WORN_MORE_FIRST + offset % WORN_MORE_COUNT);
}

/* From here on the NIC looks at what comes to the port. */
inline_fn void wear_mark(__be16 worn)
{
	__u16 port = bpf_ntohs(worn);
	__u32 word = port / 64;
	__u64 bit = 1ull << (port % 64), *had;

	if (dry_run || !worn_more(worn))
		return;
	had = bpf_map_lookup_elem(&mst_frontend_ports_v1, &word);
	if (had && !(*had & bit))
		__sync_fetch_and_or(had, bit);
}

/* Whether the flow may have the port. @t: as the other end sees it; @try: how often it was asked for others */
inline_fn bool wear_free(struct __sk_buff *skb, const struct pkt *p, const struct tuple *t, __u32 now, int try)
{
	const struct addr *opener = try < NAT_PORT_TRIES / 4 ? &p->t.src : NULL;

	return !tuple_taken(t, p->proto, now, opener, half_open_yields(try)) && !host_has_port(skb, t, p);
}
