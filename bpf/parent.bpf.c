// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The egress of a link whose children are pods (macvlan, ipvlan). Programs
 * inside a pod can be passed by: a packet socket with PACKET_QDISC_BYPASS skips
 * the pod's egress hook, and a pod with CAP_NET_ADMIN can make itself a second
 * child of the same parent. What leaves the node is therefore checked here
 * again: it must be the node's own, or come from a pod's address and link
 * address, out of that pod's namespace, and be of a flow that the pod's own
 * hook has let through.
 */
#include "lib/common.h"
#include "lib/conntrack.h"
#include "lib/drop.h"
#include "lib/ends.h"
#include "lib/frag.h"
#include "lib/icmp_error.h"
#include "lib/kernel.h"
#include "lib/parse.h"
#include "lib/policy.h"
#include "lib/source.h"

/* Who sent a packet, as far as it shows. */
struct sender {
	__u64 netns; /* whose socket; 0: nobody's */
	__u32 id;    /* endpoint; 0: the node */
	bool by_mac; /* found by its link address, which is its own */
};

/* The one kind of packet that has no network header. */
inline_fn bool is_arp(const struct pkt *p)
{
	return p->kind == PKT_CONTROL && !p->l4_off;
}

/**
 * source_of - the address that a packet claims to come from
 * @a: the sender's; of ARP what it says the sender's is
 */
inline_fn int source_of(struct __sk_buff *skb, const struct pkt *p, struct addr *a)
{
	__be32 ip = 0;

	*a = p->t.src;
	if (!is_arp(p))
		return REASON_NONE;
	if (bpf_skb_load_bytes(skb, ARP_SENDER_IP, &ip, sizeof(ip)))
		return REASON_TRUNCATED;
	if (ip)
		addr_from_ipv4(a, ip);
	return REASON_NONE;
}

/* Control packets of a host that has no address yet, and those that never leave the link. */
inline_fn bool unnumbered(const struct pkt *p, const struct addr *a)
{
	return link_local(a) || (p->kind == PKT_CONTROL && addr_is_none(a));
}

/* A pod whose packets meet a program on the node before they get here, like those that a tunnel
 * carries under the node's address. */
inline_fn bool checked_on_node(__u64 netns)
{
	struct netns_info *info = bpf_map_lookup_elem(&mst_netns_v1, &netns);
	struct endpoint *ep = info ? endpoint_slot(info->endpoint) : NULL;

	return ep && ep->generation && ep->flags & EP_HOST_END;
}

/* The node's own child of a parent: the way to the pods. */
inline_fn bool leads_to_pods(__u32 parent, __u32 ifindex)
{
	struct child_key key = { .parent = parent, .mac = { 0xff, 0xff } };

	__builtin_memcpy(key.mac + 2, &ifindex, sizeof(ifindex));
	return ifindex == parent || bpf_map_lookup_elem(&mst_children_v1, &key);
}

/**
 * node_routes_from - whether the node may send a packet from @a that none of its sockets made
 * @a: an address that no endpoint has
 *
 * It is the node's own address, or belongs to a network that the node is connected to by another
 * interface, for which it forwards. Gateways do not count: the default route would let all pass.
 */
slow_fn bool node_routes_from(struct __sk_buff *skb, const struct addr *a, bool arp)
{
	struct bpf_fib_lookup way = { .ifindex = LOOPBACK_IFINDEX };
	bool ipv4 = addr_is_ipv4(a);
	struct addr hop = {};

	way.family = ipv4 ? AF_INET : AF_INET6;
	if (ipv4)
		way.ipv4_dst = a->words[3];
	else
		__builtin_memcpy(way.ipv6_dst, a, sizeof(*a));
	switch (bpf_fib_lookup(skb, &way, sizeof(way), 0)) {
	case BPF_FIB_LKUP_RET_NOT_FWDED: /* its own, or no route */
		return true;
	case BPF_FIB_LKUP_RET_FWD_DISABLED: /* the kernel looks no further; then at least */
		return arp;
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
	case BPF_FIB_LKUP_RET_FRAG_NEEDED:
		break;
	default:
		return false;
	}
	if (way.family != (ipv4 ? AF_INET : AF_INET6))
		return false;
	if (ipv4)
		addr_from_ipv4(&hop, way.ipv4_dst);
	else
		__builtin_memcpy(&hop, way.ipv6_dst, sizeof(hop));
	return addr_equal(&hop, a) && !leads_to_pods(skb->ifindex, way.ifindex);
}

/**
 * sender_of_answer - the pod whose answer to a client outside the link's ingress has turned back (lib/edge.h)
 * @p: its tuple becomes what the pod sent
 * @from: id is set
 *
 * Return: enum drop_reason.
 */
slow_fn int sender_of_answer(struct pkt *p, struct sender *from, __u32 now)
{
	struct flow f = { .now = now };
	struct tuple sent;

	if (p->kind != PKT_FLOW || (p->frag && frag_follow(p, now, false)))
		return REASON_SPOOFED_ADDRESS;
	ct_find(&f, p, CT_SCOPE_FLOW);
	if (!f.e || !(f.e->flags & CT_EDGE) || f.e->role != CT_PRE_NAT || !f.reply || !f.e->responder.endpoint)
		return REASON_SPOOFED_ADDRESS;
	from->id = f.e->responder.endpoint;
	tuple_reverse(&sent, &f.e->other);
	p->t = sent;
	return REASON_NONE;
}

/**
 * sender_before_nat - the pod whose packet got another source from the node's stack, which lies between some pods and
 * the link: it masqueraded the packet, or led a port of the node's to the pod
 * @p: its tuple becomes what the pod sent, by the packet's own port, else by its socket's
 * @from: has netns; id is set
 *
 * Return: enum drop_reason.
 */
slow_fn int sender_before_nat(struct __sk_buff *skb, struct pkt *p, struct sender *from, __u32 now)
{
	struct netns_info *info = bpf_map_lookup_elem(&mst_netns_v1, &from->netns);
	struct endpoint *ep = info ? endpoint_slot(info->endpoint) : NULL;
	struct flow f = { .now = now };
	struct sent_by socket;

	if (!ep || !ep->generation || !(ep->flags & EP_NODE_ROUTES) || p->kind != PKT_FLOW)
		return REASON_SPOOFED_ADDRESS;
	sender_socket(skb, &socket);
	if (socket.passes_hooks || !node_routes_from(skb, &p->t.src, false) || (p->frag && frag_follow(p, now, false)))
		return REASON_SPOOFED_ADDRESS;
	p->t.src = p->ipv6 ? ep->ip6 : ep->ip4;
	ct_find(&f, p, CT_SCOPE_FLOW);
	if (!f.e) {
		p->t.sport = bpf_htons(socket.port);
		ct_find(&f, p, CT_SCOPE_FLOW);
	}
	if (!f.e)
		return REASON_SPOOFED_ADDRESS;
	from->id = info->endpoint;
	return REASON_NONE;
}

/**
 * sender_by_address - the endpoint whose address a packet carries, when its link address does not tell
 * @from: id is set; 0 for what the node itself may send
 *
 * Return: enum drop_reason.
 */
slow_fn int sender_by_address(struct __sk_buff *skb, struct pkt *p, struct sender *from)
{
	struct addr a;
	int reason = source_of(skb, p, &a);

	if (reason)
		return reason;
	from->id = endpoint_of(&a);
	if (from->id || unnumbered(p, &a))
		return REASON_NONE;
	if (from->netns) {
		if (checked_on_node(from->netns) || !sender_of_answer(p, from, now_seconds()))
			return REASON_NONE;
		return sender_before_nat(skb, p, from, now_seconds());
	}
	return node_routes_from(skb, &a, is_arp(p)) ? REASON_NONE : REASON_SPOOFED_ADDRESS;
}

/**
 * sender_of - who sent a packet that none of the node's sockets did
 * @malformed: enum drop_reason of its headers
 *
 * Return: enum drop_reason.
 */
inline_fn int sender_of(struct __sk_buff *skb, struct pkt *p, const struct parent *parent, int malformed,
			struct sender *from)
{
	struct child_key key = { .parent = skb->ifindex };
	__u32 *child;

	if (bpf_skb_load_bytes(skb, ETH_ALEN, key.mac, ETH_ALEN))
		return REASON_TRUNCATED;
	if (!parent->shared_mac && __builtin_memcmp(key.mac, parent->mac, ETH_ALEN)) {
		child = bpf_map_lookup_elem(&mst_children_v1, &key);
		if (!child)
			return REASON_UNKNOWN_CHILD;
		from->id = *child;
		from->by_mac = from->id;
		if (from->id)
			return malformed;
	}
	/* All children of an ipvlan have the parent's link address, and anybody can write the node's. */
	if (malformed)
		return from->netns ? malformed : REASON_NONE; /* the node forwards more than what is parsed */
	return sender_by_address(skb, p, from);
}

/* Whether the pod's egress hook has let the packet's flow through, and policy still does. */
inline_fn int seen_by_hook(struct __sk_buff *skb, struct pkt *p, __u32 id, __u32 now)
{
	struct flow f = { .now = now };
	struct quote q = {};
	int reason;

	if (p->kind == PKT_ICMP_ERROR) {
		reason = error_flow(skb, p, &f, &q);
		if (reason)
			return reason;
		if (f.e && error_of_others(&f, id))
			return REASON_HOOK_BYPASSED;
	} else {
		ct_find(&f, p, CT_SCOPE_FLOW);
	}
	if (!f.e)
		return REASON_HOOK_BYPASSED;
	return ends_current(f.e) ? REASON_NONE : judge_again(f.e, &f.key, id, !f.reply);
}

SEC("tc")
int parent_egress(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, now = now_seconds();
	struct parent *parent = bpf_map_lookup_elem(&mst_parents_v1, &ifindex);
	struct sender from = {};
	struct endpoint *self;
	struct pkt p = {};
	int reason;

	if (!parent)
		return NEXT;
	from.netns = dry_run ? 0 : sender_netns(skb); /* a packet that is asked about has no socket of its sender's */
	if (from.netns && from.netns == node_netns)
		return NEXT;
	reason = parse(skb, &p);
	reason = sender_of(skb, &p, parent, reason, &from);
	if (!reason && !from.id)
		return NEXT;
	self = endpoint_slot(from.id);
	if (!reason && (!self || !self->generation))
		reason = REASON_NO_ENDPOINT;
	if (!reason && self)
		reason = source_check(skb, &p, self, from.id, from.by_mac);
	if (!reason && self && from.netns && from.netns != self->netns_cookie)
		reason = REASON_SPOOFED_ADDRESS;
	if (!reason && p.frag)
		reason = frag_follow(&p, now, false);
	if (!reason && self && p.kind == PKT_CONTROL)
		reason = judge_group(skb, &p, self, from.id, true);
	else if (!reason)
		reason = seen_by_hook(skb, &p, from.id, now);
	if (!reason)
		return NEXT;
	skb->cb[CB_ENDPOINT] = from.id; /* for whoever reads of it */
	return drop(skb, reason, DIR_PARENT);
}

char __license[] SEC("license") = "Dual BSD/GPL";
