/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Rewriting a packet's tuple. Checksums are updated by the difference
 * (RFC 1624), so one that was wrong stays wrong, and one that the device is to
 * fill in stays so.
 */
#pragma once

#include "common.h"
#include "parse.h"

inline_fn int nat_addrs_ipv4(struct __sk_buff *skb, const struct tuple *from, const struct tuple *to,
			     __s64 *diff)
{
	__be32 old[2] = { from->src.words[3], from->dst.words[3] };
	__be32 new[2] = { to->src.words[3], to->dst.words[3] };

	*diff = bpf_csum_diff(old, sizeof(old), new, sizeof(new), 0);
	if (bpf_l3_csum_replace(skb, ETH_HLEN + 10, 0, *diff, 0))
		return -1;
	return bpf_skb_store_bytes(skb, ETH_HLEN + 12, new, sizeof(new), 0);
}

inline_fn int nat_addrs_ipv6(struct __sk_buff *skb, const struct tuple *from, const struct tuple *to,
			     __s64 *diff)
{
	*diff = bpf_csum_diff((__be32 *)&from->src, 32, (__be32 *)&to->src, 32, 0);
	return bpf_skb_store_bytes(skb, ETH_HLEN + 8, &to->src, 32, 0);
}

/**
 * translate - rewrite addresses and ports of a packet
 * @p: the packet; its tuple becomes @to
 * @to: same family; the ports of a later fragment are in its first one
 *
 * Return: enum drop_reason.
 */
global_fn int translate(struct __sk_buff *skb, struct pkt *p, const struct tuple *to)
{
	__u64 zero_is_none;
	__s64 diff;
	__u32 csum;
	bool udp;
	int err;

	if (!p || !to)
		return REASON_NAT_FAILED;
	udp = p->proto == IPPROTO_UDP;
	csum = p->l4_off + (udp ? 6 : 16);
	zero_is_none = udp ? BPF_F_MARK_MANGLED_0 : 0;
	if (!udp && p->proto != IPPROTO_TCP)
		return REASON_NAT_FAILED;
	err = p->ipv6 ? nat_addrs_ipv6(skb, &p->t, to, &diff) : nat_addrs_ipv4(skb, &p->t, to, &diff);
	if (err)
		return REASON_NAT_FAILED;
	if (p->frag != FRAG_LATER) {
		__be32 old = *(__be32 *)&p->t.sport, new = *(__be32 *)&to->sport;

		if (bpf_l4_csum_replace(skb, csum, 0, diff, BPF_F_PSEUDO_HDR | zero_is_none))
			return REASON_NAT_FAILED;
		if (old != new) {
			if (bpf_l4_csum_replace(skb, csum, old, new, zero_is_none | sizeof(new)))
				return REASON_NAT_FAILED;
			if (bpf_skb_store_bytes(skb, p->l4_off, &new, sizeof(new), 0))
				return REASON_NAT_FAILED;
		}
	}
	p->t = *to;
	return REASON_NONE;
}
