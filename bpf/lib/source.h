/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A pod sends from its own link and network addresses only. */
#pragma once

#include "common.h"
#include "parse.h"

/* Offset of the sender's protocol address in an Ethernet frame with ARP for IPv4 (RFC 826). */
#define ARP_SENDER_IP (ETH_HLEN + 14)

/* The same of a neighbour advertisement's target, in ICMPv6 (RFC 4861 4.4). What routers tell (4.2, 4.5) lies around it. */
#define ND_ROUTER 134
#define ND_ADVERTISEMENT 136
#define ND_REDIRECT 137
#define ND_TARGET 8

/* ::, or 0.0.0.0 */
inline_fn bool addr_is_none(const struct addr *a)
{
	return addr_is_zero(a) || (addr_is_ipv4(a) && !a->words[3]);
}

inline_fn bool address_of(const struct addr *a, const struct endpoint *ep, __u32 id)
{
	if (addr_is_zero(a)) /* equals the address that a pod does not have */
		return false;
	return addr_equal(a, &ep->ip4) || addr_equal(a, &ep->ip6) || endpoint_of(a) == id;
}

/* The sender that an ARP packet names; 0.0.0.0 asks whether an address is free (RFC 5227). */
slow_fn int arp_check(struct __sk_buff *skb, const struct endpoint *self, __u32 id)
{
	struct addr sender;
	__be32 ip;

	if (bpf_skb_load_bytes(skb, ARP_SENDER_IP, &ip, sizeof(ip)))
		return REASON_TRUNCATED;
	addr_from_ipv4(&sender, ip);
	return !ip || address_of(&sender, self, id) ? REASON_NONE : REASON_SPOOFED_ADDRESS;
}

/* Whether a message says who has an address, or who leads to others. */
inline_fn bool speaks_for(__u8 type)
{
	return type == ND_ADVERTISEMENT || type == ND_ROUTER || type == ND_REDIRECT;
}

/* Whether a link-local address is that of an endpoint's router. All others may be the pod's own: nobody knows which it has. */
slow_fn bool of_router(const struct addr *a, __u32 id)
{
	struct addr *router = bpf_map_lookup_elem(&mst_routers_v1, &id);

	return router && addr_equal(router, a);
}

/* The address that a neighbour advertisement speaks of, as ARP's sender. And no pod is a router: who believed it would send
 * it what it may not pass on. */
slow_fn int advertised_check(struct __sk_buff *skb, const struct pkt *p, const struct endpoint *self, __u32 id)
{
	struct addr target;

	if (p->icmp_type != ND_ADVERTISEMENT)
		return REASON_SPOOFED_ADDRESS;
	if (bpf_skb_load_bytes(skb, p->l4_off + ND_TARGET, &target, sizeof(target)))
		return REASON_TRUNCATED;
	if (link_local(&target))
		return of_router(&target, id) ? REASON_SPOOFED_ADDRESS : REASON_NONE;
	return address_of(&target, self, id) ? REASON_NONE : REASON_SPOOFED_ADDRESS;
}

/**
 * source_check - whether a packet's source is what its endpoint may use
 * @self: the endpoint it came from
 * @id: of @self
 * @own_mac: false where all endpoints of a parent share its link address
 *
 * Return: enum drop_reason.
 */
inline_fn int source_check(struct __sk_buff *skb, const struct pkt *p, const struct endpoint *self, __u32 id,
			   bool own_mac)
{
	struct ethhdr *eth = packet(skb);

	if ((void *)(eth + 1) > packet_end(skb))
		return REASON_TRUNCATED;
	if (own_mac && !mac_equal(eth->h_source, self->mac))
		return REASON_SPOOFED_MAC;
	if (p->kind == PKT_CONTROL && eth->h_proto == bpf_htons(ETH_P_ARP))
		return arp_check(skb, self, id);
	if (p->kind == PKT_CONTROL && p->proto == IPPROTO_ICMPV6 && speaks_for(p->icmp_type) &&
	    advertised_check(skb, p, self, id))
		return REASON_SPOOFED_ADDRESS;
	if (p->kind == PKT_CONTROL && addr_is_none(&p->t.src)) /* it has none yet */
		return REASON_NONE;
	if (link_local(&p->t.src)) /* never leaves the link */
		return of_router(&p->t.src, id) ? REASON_SPOOFED_ADDRESS : REASON_NONE;
	return address_of(&p->t.src, self, id) ? REASON_NONE : REASON_SPOOFED_ADDRESS;
}

/* The host forwards with the link address of its own child. */
slow_fn bool host_child(const struct ethhdr *eth, __u32 parent)
{
	struct child_key key = { .parent = parent };
	__u32 *id;

	if (!eth)
		return false;
	__builtin_memcpy(key.mac, eth->h_source, ETH_ALEN);
	id = bpf_map_lookup_elem(&mst_children_v1, &key);
	return id && !*id;
}

/**
 * sibling_check - whether a packet that claims to be of a sibling has that one's link address
 * @self: the endpoint it came to, inside whose pod the program runs
 * @sender: id of the endpoint whose network address it carries, or 0
 *
 * Return: enum drop_reason.
 */
inline_fn int sibling_check(struct __sk_buff *skb, const struct endpoint *self, __u32 sender)
{
	struct endpoint *from = sender ? endpoint_slot(sender) : NULL;
	struct ethhdr *eth = packet(skb);
	struct ethhdr copy;

	if (!self->parent || !from || from == self || from->parent != self->parent)
		return REASON_NONE;
	if ((void *)(eth + 1) > packet_end(skb))
		return REASON_TRUNCATED;
	if (mac_equal(eth->h_source, from->mac))
		return REASON_NONE;
	copy = *eth;
	return host_child(&copy, self->parent) ? REASON_NONE : REASON_SPOOFED_MAC;
}
