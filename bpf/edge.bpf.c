// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The node's NIC, for Services that clients outside use, and for answers to masqueraded pods; the door, for the node's
 * own SCTP; and where gathered fragments come back. What is none of these goes on as if nothing were here. lib/edge.h
 * says who turns the answers back.
 */
#include "lib/common.h"
#include "lib/conntrack.h"
#include "lib/drop.h"
#include "lib/edge.h"
#include "lib/edge_in.h"
#include "lib/enter.h"
#include "lib/frag.h"
#include "lib/nat.h"
#include "lib/nic.h"
#include "lib/nobody.h"
#include "lib/parse.h"
#include "lib/remote.h"

/* Whether an address is the node's own beyond doubt: the one that flows wear here, or that it has between nodes. */
inline_fn bool own_address(const struct addr *a)
{
	return worn_at(from_tunnel ? EDGE_TUNNEL : EDGE_WIRE, a) || of_this_node(a);
}

/* The port that a packet of TCP or UDP goes to, if it is whole and plain; 0: it is not. */
inline_fn __be16 plain_port(struct __sk_buff *skb, bool *udp)
{
	void *data = packet(skb) + ETH_HLEN, *end = packet_end(skb);
	struct ipv6hdr *ip6 = data;
	struct iphdr *ip4 = data;
	__be16 *ports;
	__u8 proto;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		ports = (void *)(ip4 + 1);
		if ((void *)(ports + 2) > end || *(__u8 *)ip4 != 0x45 ||
		    ip4->frag_off & bpf_htons(IP_MORE_FRAGMENTS | IP_OFFSET_MASK))
			return 0;
		proto = ip4->protocol;
	} else {
		ports = (void *)(ip6 + 1);
		if ((void *)(ports + 2) > end)
			return 0;
		proto = ip6->nexthdr;
	}
	*udp = proto == IPPROTO_UDP;
	return *udp || proto == IPPROTO_TCP ? ports[1] : 0;
}

/* Whether a packet is for somebody here, as its link says. */
inline_fn bool for_this_host(struct __sk_buff *skb)
{
	return skb->pkt_type == PACKET_HOST && !of_vlan(skb);
}

/* What an address that a packet is for means here. Answers come to the one that flows wear, whether it takes node ports or
 * not. Pods of other nodes reach this node's own addresses by the tunnel, and so its node ports; what else is a Service's
 * they know themselves. */
inline_fn __u16 destination_flags(const struct addr *dst)
{
	__u16 flags;

	if (worn_at(from_tunnel ? EDGE_TUNNEL : EDGE_WIRE, dst))
		return SVC_ADDRESS | SVC_NODE;
	flags = address_flags(dst);
	return from_tunnel && !(flags & SVC_NODE) ? 0 : flags;
}

/* What may be an answer of a pod on this NIC to a client outside: when the node is the pod's gateway,
 * it passes here on its way to the node. There it is turned back, or the node's stack, which did not
 * see the question, would masquerade the answer as a flow of the pod's own. */
inline_fn bool edge_passing(struct __sk_buff *skb)
{
	return !from_tunnel && (skb->pkt_type == PACKET_HOST || skb->pkt_type == PACKET_OTHERHOST) &&
	       edge_turns(EDGE_TURN_IN);
}

#define ADDRESS_LEFT 32768 /* beside enum service_flag: nobody's any more */

/* What may be of a connection that is left of a Service whose address went with it. @p: as glance leaves it, which
 * knows no ports of SCTP, and with the protocol */
inline_fn bool left_behind(const struct __sk_buff *skb, const struct pkt *p)
{
	if (from_tunnel || skb->pkt_type != PACKET_HOST)
		return false;
	return p->shape ? gone_port(p->t.dport) : p->proto == IPPROTO_SCTP;
}

/* Whether a fragment has been gathered: it is in order, and for the node whatever its link address. */
slow_fn bool gathered(struct __sk_buff *skb)
{
	__u8 gather[6] = GATHER_MAC, mac[6];

	if (bpf_skb_load_bytes(skb, 0, mac, sizeof(mac)) || __builtin_memcmp(mac, gather, sizeof(mac)))
		return false;
	return skb->pkt_type == PACKET_HOST || !bpf_skb_change_type(skb, PACKET_HOST);
}

/* A fragment that overtook its datagram's first: nobody knows yet whether it is a Service's. */
slow_fn int edge_orphan(struct __sk_buff *skb, const struct pkt *p, __u32 now)
{
	if (from_door || skb->mark || /* somebody's, which would be lost */
	    (p->proto != IPPROTO_UDP && p->proto != IPPROTO_SCTP && !p->ipv6))
		return NEXT;
	return frag_gather(skb, p, now, skb->ifindex);
}

/* What is for the node itself, at no port of the edge's, as far as the little of it tells that is looked at, goes on.
 * The stack judges the rest of it. */
SEC("tc")
int from_outside(struct __sk_buff *skb)
{
	struct addr dst;
	__be16 port;
	bool udp;

	if (for_this_host(skb) && destination(skb, &dst) != NO_DESTINATION) {
		port = plain_port(skb, &udp);
		if (port && !edge_port(port) && own_address(&dst))
			return NEXT;
	}
	if (from_door)
		return node_call(skb, NODE_PROG_EDGE_IN_DOOR);
	return node_call(skb, from_tunnel ? NODE_PROG_EDGE_IN_TUNNEL : NODE_PROG_EDGE_IN);
}

/* Where netdev.bpf.c's would be at the same device: both in one, for to be called is most of what either costs the
 * node's own packets. */
SEC("tc")
int from_nic(struct __sk_buff *skb)
{
	struct node_config *n = node_config();
	struct addr dst;
	__be16 port;
	bool udp;

	if (!n || !for_this_host(skb) || destination(skb, &dst) == NO_DESTINATION)
		return node_call(skb, NODE_PROG_EDGE_IN);
	if (!addr_equal(&dst, &n->ip4) && !addr_equal(&dst, &n->ip6)) { /* as between nodes */
		skb->cb[CB_TUNNEL] = WIRE_OR_EDGE;
		if (maybe_endpoint(&dst))
			return node_call(skb, NODE_PROG_NETDEV_IN);
		port = plain_port(skb, &udp);
		return port && !edge_port(port) && own_address(&dst) ? NEXT : node_call(skb, NODE_PROG_EDGE_IN);
	}
	port = plain_port(skb, &udp);
	skb->cb[CB_TUNNEL] = WIRE_TUNNEL;
	if (port && udp && port == n->port && n->overlay)
		return node_call(skb, NODE_PROG_NETDEV_IN);
	return port && !edge_port(port) ? NEXT : node_call(skb, NODE_PROG_EDGE_IN);
}

/* What may be a Service's, or a flow's from outside. */
SEC("tc")
int edge_in(struct __sk_buff *skb)
{
	__u32 generation = nobody_generation();
	bool again = false;
	struct pkt p = {};
	struct addr dst;
	struct flow f;
	int verdict, proto;
	__u16 address;

	skb->cb[CB_ENDPOINT] = 0; /* no pod's hook */
	p.shape = glance(skb, &p);
	way_slot_note(skb, WAY_NONE);
	if (p.shape && skb->pkt_type == PACKET_HOST) {
		if (nobodys(&p))
			return NEXT;
		verdict = edge_fast(skb, &p);
		if (verdict != FAST_NO)
			return edge_done(skb, &p, verdict);
	}
	proto = destination(skb, &dst);
	if (proto == NO_DESTINATION)
		return NEXT;
	if (!p.shape) {
		p.proto = proto;
		again = gathered(skb);
	}
	address = skb->pkt_type == PACKET_HOST ? destination_flags(&dst) : 0;
	if (!address && left_behind(skb, &p))
		address = ADDRESS_LEFT;
	if (!address && !edge_passing(skb))
		return NEXT;
	f = (struct flow){ .now = now_seconds() };
	/* What does not add up is the stack's to judge, as if nothing were here. */
	if (!p.shape) {
		if (parse(skb, &p))
			return NEXT;
		if (p.frag && frag_follow(&p, f.now, !again))
			return address & SVC_ADDRESS && !again ? edge_orphan(skb, &p, f.now) : NEXT;
	}
	if (address && p.kind == PKT_ICMP_ERROR)
		return edge_done(skb, &p, edge_error(skb, &p, f.now));
	if (p.kind != PKT_FLOW)
		return NEXT;
	if (address & SVC_NODE && !edge_port(p.t.dport)) { /* of another address of the node's */
		if (p.shape && stays_nobodys(p.t.dport))
			nobody_keep(&p, generation);
		return NEXT;
	}
	ct_find_whole(&f, &p, CT_SCOPE_FLOW);
	if (!from_door && f.e && !f.reply && f.e->role == CT_PRE_NAT && f.e->flags & CT_MASQUERADE) /* a pod's here, which sends elsewhere */
		return edge_done(skb, &p, edge_drop(skb, REASON_WIRE_SPOOFED));
	if (f.e && asks_back(&f, &p)) /* the node's to answer */
		return NEXT;
	if (address && f.e && f.e->flags & CT_EDGE && (begins_anew(&f, &p) || (!f.reply && edge_worn_out(f.e, &p.t))))
		ct_forget(&f);
	if (!f.e)
		return address ? edge_done(skb, &p, edge_new(skb, &p, generation, f.now)) : NEXT;
	if (!(f.e->flags & CT_EDGE) || !(address || f.reply))
		return NEXT;
	ct_touch(&f, &p);
	verdict = f.e ? edge_known(skb, &p, &f) : edge_drop(skb, REASON_CT_FULL);
	return edge_done(skb, &p, verdict);
}

/* Answers of the node's own sockets, and of pods with a NIC of their own; also at the tunnel's device. */
SEC("tc")
int to_outside(struct __sk_buff *skb)
{
	struct facts *known = facts();

	return known && known->edge_turn ? node_call(skb, NODE_PROG_EDGE_OUT) : NEXT;
}

/* An ICMP error about what a client outside sent: it knows the Service, not the backend. */
slow_fn int edge_error_out(struct __sk_buff *skb, struct pkt *p, __u32 now)
{
	struct flow f = { .now = now };
	struct quote q = {};
	struct tuple t;
	int reason;

	if (error_flow(skb, p, &f, &q) || !f.e || f.e->role != CT_POST_NAT || !f.reply ||
	    (f.e->flags & (CT_EDGE | CT_MASQUERADE)) != CT_EDGE)
		return NEXT;
	t = f.e->other;
	reason = translate_error(skb, p, &q, &t);
	return reason ? drop(skb, reason, DIR_EDGE) : NEXT;
}

SEC("tc")
int edge_out(struct __sk_buff *skb)
{
	struct pkt p = {};
	struct flow f;
	int reason;

	skb->cb[CB_ENDPOINT] = 0;
	f = (struct flow){ .now = now_seconds() };
	if (parse(skb, &p) || (p.frag && frag_follow(&p, f.now, false)))
		return NEXT;
	if (p.kind == PKT_ICMP_ERROR)
		return edge_error_out(skb, &p, f.now);
	if (p.kind != PKT_FLOW)
		return NEXT;
	ct_find_whole(&f, &p, CT_SCOPE_FLOW);
	if (!f.e || !(f.e->flags & CT_EDGE) || f.e->role != CT_POST_NAT || !f.reply)
		return NEXT;
	ct_touch(&f, &p);
	if (!f.e)
		return drop(skb, REASON_CT_FULL, DIR_EDGE);
	reason = translate(skb, &p, &f.e->other, true);
	return reason ? drop(skb, reason, DIR_EDGE) : NEXT;
}

/* Where datagrams come back that were put together. What a kernel says of itself on any device ends here. */
SEC("tc")
int from_gather(struct __sk_buff *skb)
{
	struct node_config *n = node_config();
	struct frag_ports *pair;
	struct frag_key key = {};
	struct pkt p = {};

	if (!n || parse(skb, &p) || !p.frag)
		return TC_ACT_SHOT;
	frag_key_of(&key, &p);
	if (p.frag == FRAG_FIRST)
		bpf_map_delete_elem(&mst_frags_v1, &key); /* the others are behind it */
	frag_pair_of(&key, &p);
	pair = bpf_map_lookup_elem(&mst_frags_v1, &key);
	if (!pair || frag_is_old(pair, now_seconds()))
		return TC_ACT_SHOT;
	if (!pair->back)
		return NEXT;
	if (pair->back == n->overlay)
		skb->mark = n->key;
	return bpf_redirect(pair->back, BPF_F_INGRESS);
}

char __license[] SEC("license") = "Dual BSD/GPL";
