/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Flow state: the types of what is known of flows and their packets, shared with
 * Go as types.h is. docs/datapath.md says what lives where.
 */
#pragma once

#include "types.h"

enum ct_scope {
	CT_SCOPE_FLOW = 0,
	CT_SCOPE_SHADOW = 1, /* a direct flow whose own tuple a translated flow occupies */
};

/* Both directions of a flow share one key: the end that sorts first is `lo`. */
struct ct_key {
	struct addr lo;
	struct addr hi;
	__be16 lo_port;
	__be16 hi_port;
	__u8 proto;
	__u8 scope; /* enum ct_scope */
	__u16 pad;
};
_Static_assert(sizeof(struct ct_key) == 40, "ct_key");

enum ct_role {
	CT_DIRECT = 0,   /* no translation: one entry */
	CT_PRE_NAT = 1,  /* keyed by the tuple the client sees */
	CT_POST_NAT = 2, /* keyed by the tuple the backend sees */
};

enum ct_flag {
	CT_ORIGIN_IS_HI = 1, /* the flow was opened by the key's `hi` end */
	CT_VIA_STACK = 2,    /* came through the host's stack: replies go back that way */
	CT_EDGE = 4,         /* a client outside uses a Service: replies leave by the node's NIC */
	CT_FROM_NODE = 8,    /* opened by the node itself, which no policy keeps from its pods */
	CT_MASQUERADE = 16,  /* with CT_EDGE: a pod's, to the outside, under the node's address (lib/masquerade.h) */
	CT_EITHER = 32,      /* it began in the middle, and either end may have opened it, as policy was: it is as long as both may */
};

enum ct_closing {
	CT_FIN = 1,
	CT_RST = 2,
};

/* Whether a flow is half-open, and where it then lies. */
enum ct_opening {
	CT_ANSWERED = 0,
	CT_OPENING = 1,          /* in the small table */
	CT_OPENING_IN_PLACE = 2, /* in the big one, where a dead entry was, or on credit */
};

/* How many half-open flows may begin in the big table where no dead entry was. */
#define CT_CREDIT 4096

/* Instead of an endpoint: a change of policy cut the flow. No endpoint has this id, so each
 * packet of the flow is judged again, in its original direction. */
enum ct_end_id {
	CT_END_CUT = 0xffffffff,
};

/* What was decided about one end of the flow, and when. endpoint 0: not on this node, and
 * generation is the node that has it (struct remote.ref), 0: nobody that is known. */
struct ct_end {
	__u32 endpoint;
	__u32 generation;
};

struct ct_entry {
	__u32 expires; /* CLOCK_MONOTONIC in units of 2^30 ns */
	__u8 role;     /* enum ct_role */
	__u8 flags;    /* enum ct_flag */
	/* Single-writer bytes, so that two CPUs need no atomic read-modify-write. */
	__u8 seen_reply;
	__u8 shadow;   /* 1: the PRE half is keyed with CT_SCOPE_SHADOW */
	__u8 closing_orig;  /* enum ct_closing, by the opener's packets */
	__u8 closing_reply; /* by the other end's */
	__u8 opening;       /* enum ct_opening */
	__u8 near;          /* 1: it lies in mst_ct_near */
	struct ct_end opener;
	struct ct_end responder;
	__u32 backend;      /* id, or enum backend_id */
	/* The other half's tuple in the flow's original direction. Of a flow without translation that lies near:
	 * between a pod of this node and one of another a struct near_ways, between two of this node a struct
	 * near_pods, or with their programs inside a struct near_siblings. Its pad, of a masqueraded flow: ifindex of the
	 * device whose address it wears, or 0. */
	struct tuple other;
};
_Static_assert(sizeof(struct ct_entry) == 72, "ct_entry");

/* Room for one TCP flow, or for one half of a translated one (lib/near.h). */
struct near_flow {
	struct ct_key key;
	struct ct_entry e;
	__u32 until;  /* in the kernel's ticks: its packets take the short way; then the entry is looked at */
	__u32 tables; /* the tables' generation under which they may */
	/* As ct_entry.expires: until then a flow of this place may lie in a table for all flows. Of a place's second any
	 * flow, of its first one that who begins a flow near must know of (near_elsewhere). */
	__u32 others;
	__u8 filled; /* the engine's, in the first place's second flow alone: it has told all places of others (fillNear) */
	__u8 plain;  /* 1: one end is on another node or outside, and its packets pass no tunnel; as long as `until` */
	__u16 mtu;   /* of a struct near_ways or near_pods: the longest packet that the pods of this node both take */
};
_Static_assert(sizeof(struct near_flow) == 128, "near_flow");

/* A place: for any two of the flows whose tuple gives it. */
#define NEAR_PLACES 32768
struct near_place {
	struct near_flow flows[2];
};

/* Two pods and a port: a flow between them is allowed. */
#define PAIR_SLOTS 64
struct pair {
	struct addr src;
	struct addr dst;
	__be16 dport;
	__u16 direct; /* 1: at that port of that address is no Service; else that is not known */
	__u32 opener; /* endpoint; 0: a pod of the node that opener_generation is */
	__u32 opener_generation;
	__u32 responder; /* the same */
	__u32 responder_generation;
	__u32 generation; /* of the tables, mixed */
	__u32 until;      /* in the kernel's ticks */
	__u32 last;       /* to or from another node: where its last flow's way is kept (lib/way.h), or 0 */
};
_Static_assert(sizeof(struct pair) == 64, "pair");

/* How packets of a flow pass a hook. */
enum fast_flag {
	FAST_TO_POD = 1,      /* the hook is to_pod, else from_pod */
	FAST_OPENING = 2,     /* the entry is half-open: it must learn of each packet until it is not */
	FAST_DELIVER = 4,     /* to the endpoint at the other end; else they are left to the kernel */
	FAST_TRANSLATE = 8,
	FAST_CLOSING = 16,    /* the flow is closing: its slot may be taken, but holds until then */
	FAST_VIA_STACK = 32,  /* it came through the host's stack; at the NIC: it is the stack's */
	FAST_AT_EDGE = 64,    /* the hook is a device at the edge (lib/edge.h) */
	FAST_BY_EDGE = 128,   /* from a pod: to a client at the edge */
	FAST_MASQUERADE = FAST_BY_EDGE | FAST_DELIVER, /* from a pod: to the outside, as a router does it */
};

/* The way that packets have just left the node by (lib/way.h). */
struct way_kept {
	__u32 until;   /* in the kernel's ticks */
	__u32 ifindex;
	__u32 mtu;     /* bytes, without the link header; 0: none is kept */
	__u8 macs[12]; /* destination and source */
};

/* The way into a pod behind a host end, as its struct endpoint has it. */
struct pod_way {
	__u8 macs[12]; /* both link addresses */
	__u32 ifindex; /* of the host end */
};

/* Of a flow between a pod of this node and one of another: its ways. */
struct near_ways {
	struct way_kept out;
	struct pod_way in;
};
_Static_assert(sizeof(struct near_ways) <= sizeof(struct tuple), "an entry has room for both ways");

/* Of a flow between two pods of this node: the way to its responder, and the one to its opener. */
struct near_pods {
	struct pod_way to[2];
};
_Static_assert(sizeof(struct near_pods) <= sizeof(struct tuple), "an entry has room for both ways");

/* Of a flow between two pods on one parent. By who sends a packet, the opener first. */
struct near_siblings {
	__u8 macs[2][8];   /* the sender's link address */
	__u64 vouched[2];  /* what the vouchers of its packets have in common, or zero */
};
_Static_assert(sizeof(struct near_siblings) <= sizeof(struct tuple), "an entry has room for both");

/* What was decided about a flow's packets at one hook, and what must still be so for it to hold.
 * All that is compared lies in the first 64 bytes. */
struct fast_flow {
	struct tuple t;        /* as packets show it; pad is the hook: endpoint << 1 | direction */
	__u32 until;           /* in the kernel's ticks; then the flow's entry is looked at again */
	__u32 generation;      /* of the tables, the hook's endpoint and the flow, mixed */
	__u32 peer;            /* id of the endpoint at the flow's other end, 0: none of this node; at the NIC of the receiver */
	__u32 peer_generation;
	__u8 mac[6];           /* the sender's link address */
	__u8 proto;
	__u8 flags;            /* enum fast_flag */
	struct tuple to;       /* what the packet's tuple becomes */
	union {
		struct way_kept way; /* of packets with that tuple; has a time of its own. Into a pod: ifindex they came in by */
		__u64 vouched; /* inside a pod: what their vouchers have in common, or zero */
	} at;
};
_Static_assert(sizeof(struct fast_flow) == 128, "fast_flow");

/* Slots that flows take in turn as others close: few enough to stay in the nearest cache. */
#define FAST_FRONT 64
struct fast_front {
	struct fast_flow slots[FAST_FRONT];
};

/* A port of the node's own that is no Service's. */
#define NOBODY_SLOTS 64
struct nobody {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 pad;
	__u32 generation; /* of the tables, mixed */
	__u32 until;      /* in the kernel's ticks */
	__u32 pad2;
};
_Static_assert(sizeof(struct nobody) == 32, "nobody");

struct frag_key {
	struct addr src;
	struct addr dst;
	__u32 id;
	__u8 proto;
	__u8 pad[3];
};
/* In place of a protocol: not a datagram, but all of two addresses. Reserved by IANA. */
enum frag_kind {
	FRAG_PAIR = 255,
};
struct frag_ports {
	__be16 sport;
	__be16 dport;
	__u32 expires;
	__u8 proto; /* of the transport header */
	__u8 gathered; /* 1: nothing is known but that the datagram is put together elsewhere */
	__u16 back;    /* of FRAG_PAIR: ifindex of where its fragments came in; 0: they are the host's stack's */
};

struct facts {
	__u32 shadowed;  /* as ct_entry.expires: until then a flow may lie under CT_SCOPE_SHADOW */
	__u32 edge_turn; /* of some flow from outside, the NIC must turn replies back: enum edge_turn */
};

enum edge_turn {
	EDGE_TURN_OUT = 1, /* at its egress */
	EDGE_TURN_IN = 2,  /* at its ingress, where pods on it pass on their way to the node */
};

/* How many answers an endpoint got in a second, on one CPU. */
struct answers {
	__u32 second;
	__u16 refusals;
	__u16 too_long;
};
