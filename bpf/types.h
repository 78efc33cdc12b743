/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Shared types: what the programs and the Go side both read and write.
 * C owns them; Go's are generated. Padding is explicit and zeroed, because
 * map keys are compared byte by byte.
 */
#pragma once

#include <linux/types.h>

#define EVENT_READERS 4 /* at once */
#define STOPPED_KEPT 256 /* on each CPU */

/* One address of either family. IPv4 is held as ::ffff:a.b.c.d (RFC 4291 2.5.5.2). */
struct addr {
	union {
		__u8 bytes[16];
		__be32 words[4];
		__u64 quads[2];
	};
};

/* Both ends of a flow as a packet shows them. Echo carries its identifier in both ports. */
struct tuple {
	struct addr src;
	struct addr dst;
	__be16 sport;
	__be16 dport;
	__u32 pad;
};
_Static_assert(sizeof(struct tuple) == 40, "tuple");

enum direction {
	DIR_FROM_POD = 0,
	DIR_TO_POD = 1, /* as FAST_TO_POD */
	DIR_SOCKET = 2,
	DIR_PARENT = 3, /* from pods' common parent link to the wire */
	DIR_EDGE = 4,   /* from outside, to a Service */
	DIR_COUNT = 5,
};

/* ---- endpoints ------------------------------------------------------- */

enum endpoint_flag {
	EP_HOST_END = 1,       /* programs sit on the host's end; redirect_peer delivers */
	EP_IN_POD = 2,         /* programs sit inside the pod, directions swapped */
	EP_SERVICE_TC = 4,     /* Services by NAT at the tc hooks */
	EP_SERVICE_SOCKET = 8, /* Services at connect() and sendmsg(), of which SCTP tells no program */
	EP_NODE = 16,          /* of a namespace: it is the node's own, no endpoint's */
	EP_NODE_ROUTES = 32,   /* what leaves by the pod's link meets the node's stack, and none of its ingresses */
	EP_SETTLING = 64,      /* its filters are becoming links: a packet may meet both, the link first */
};

enum owner {
	OWNER_NONE = 0,
	OWNER_CLI = 1,
	OWNER_CNI = 2,
	OWNER_KUBERNETES = 3,
};

/* A slot of the endpoints table. generation 0 is a free slot. */
struct endpoint {
	__u32 generation;   /* changes whenever a decision about this endpoint may differ */
	__u32 ifindex;      /* host end, or inside the pod its own interface */
	__u32 parent;       /* ifindex of the parent link of an in-pod kind, else 0 */
	__u16 mtu;          /* bytes, without the link header: the longest packet that may be handed to it */
	__u16 link_mtu;     /* of the interface inside the pod; 0: unknown (written before there was this field) */
	__u64 netns_cookie; /* of the pod's namespace */
	struct addr ip4;    /* zero when it has none */
	struct addr ip6;
	__u8 mac[6];        /* the pod's interface; link_write takes both */
	__u8 node_mac[6];   /* what the pod sees as its gateway */
	__u16 flags;        /* enum endpoint_flag */
	__u8 owner;         /* enum owner */
	__u8 pad;
};
_Static_assert(sizeof(struct endpoint) == 72, "endpoint");

/* Value of the table of namespaces whose sockets are ours. */
struct netns_info {
	__u32 endpoint;
	__u32 flags; /* enum endpoint_flag, a copy */
};

/* A link whose children are pods, by its ifindex. */
struct parent {
	__u8 mac[6];
	__u8 shared_mac; /* 1: ipvlan, whose children all have the parent's link address */
	__u8 pad;
};

/* A child of a parent link, as frames show it; and the node's own once more, as routes show it:
 * ff:ff and its ifindex, which no frame may have as its sender. */
struct child_key {
	__u32 parent; /* ifindex */
	__u8 mac[6];
	__u8 pad[2];
};

/* Packets and bytes of one endpoint, on one CPU. */
struct counter {
	__u64 packets;
	__u64 bytes;
};
struct endpoint_counters {
	struct counter from_pod;
	struct counter to_pod;
};

/* ---- policy ------------------------------------------------------------- */

/* Numbers of identities and policy sets are hashes of what they stand for. */
enum identity_number {
	IDENTITY_ANYBODY = 0, /* of rules that name no peer */
	IDENTITY_ANY_POD = 1, /* of rules that select all pods of all namespaces */
	IDENTITY_NODE = 2,    /* an address of the node's own namespace */
	IDENTITY_FIRST = 16,  /* from here on: hashes */
};

/* Who has an address. 0: nothing that a rule asks for. */
struct identity {
	__u64 pod;    /* namespace, labels and named ports, or IDENTITY_NODE */
	__u64 prefix; /* which rules' blocks hold this very address; 0: mst_prefixes knows */
};

struct prefix_key {
	__u32 length; /* bits; of an IPv4 prefix 96 more */
	__be32 addr[4]; /* a struct addr, which would be aligned away from the length */
};
_Static_assert(sizeof(struct prefix_key) == 20, "prefix_key");

/* What a policy set asks about a peer, so that the rest need not be looked up. */
enum set_flag {
	SET_ANYBODY = 1,
	SET_ANY_POD = 2,
	SET_PODS = 4,
	SET_PREFIXES = 8,
	SET_INCOMPLETE = 16, /* some rule of it did not fit into a table */
	SET_UNKNOWN = 32,    /* the pod is not known yet, nor what selects it */
};

/* An endpoint's policy. Apart from struct endpoint: only first packets ask for it. */
struct endpoint_policy {
	__u64 ingress; /* policy set; 0: not isolated */
	__u64 egress;
	__u16 ingress_flags; /* enum set_flag */
	__u16 egress_flags;
	__u32 pad;
};
_Static_assert(sizeof(struct endpoint_policy) == 24, "endpoint_policy");

struct peer_key {
	__u64 set;
	__u64 identity;
};

/* What a policy set allows an identity. */
struct peer_rules {
	__u64 ports;   /* list of ports, a hash of its content */
	__u32 rule;    /* not 0: this rule allows everything */
	__u32 lengths; /* bit n: the list has port prefixes n bits long */
};

struct port_key {
	__u64 ports;
	__u16 port; /* host order, the bits after `length` zero */
	__u8 proto;
	__u8 length;
	__u32 pad;
};
_Static_assert(sizeof(struct port_key) == 16, "port_key");

/* What policy is asked about a flow, and what it answered. */
struct judgment {
	struct addr opener;
	struct addr responder;
	__u32 opener_id; /* endpoint; 0: not on this node */
	__u32 responder_id;
	__u16 port; /* the responder's, host order */
	__u8 proto;
	__u8 from_node; /* 1: the node itself opened it */
	__u32 pad;
	/* By enum verdict_end: the set that was asked, 0 where that end is not isolated; the rule
	 * that allowed, 0 when none did. */
	__u64 set[2];
	__u32 rule[2];
	/* Keys under way: the stack has no room for them. */
	struct peer_key peer;
	struct port_key ports;
	struct prefix_key prefix;
	__u32 lengths; /* of the port prefixes to look for */
};
_Static_assert(sizeof(struct judgment) == 128, "judgment");

enum verdict_end {
	VERDICT_EGRESS = 0,  /* of the opener */
	VERDICT_INGRESS = 1, /* of the responder */
};

/* ---- what is told to whoever watches ------------------------------------ */

enum event_kind {
	EVENT_OPENED = 1, /* a flow's first packet passed */
	EVENT_CLOSED = 2, /* both ends of a TCP connection closed it, or one reset it */
	EVENT_STOPPED = 3, /* a packet, or a connect(), did not pass */
};

enum event_verdict {
	EVENT_FORWARDED = 0,
	EVENT_DROPPED = 1,
	EVENT_REFUSED = 2, /* dropped, and its sender was told */
};

/* One record of a reader's ring. What is not known, or does not apply, is zero. */
struct event {
	__u64 time;            /* CLOCK_MONOTONIC, ns */
	struct tuple t;        /* as the packet showed it here; of a closed flow, as its opener sees it */
	__u64 set[2];          /* by enum verdict_end: the policy set that was asked; 0: that end is not isolated */
	struct addr frontend;  /* the Service that it was sent to */
	struct addr target;    /* the backend that it was given */
	__be16 frontend_port;
	__be16 target_port;
	__u32 backend;         /* id */
	__u32 endpoint;        /* whose hook it was */
	__u32 src_endpoint;    /* who has the source address on this node */
	__u32 dst_endpoint;
	__u32 rule[2];         /* by enum verdict_end: the rule that allowed; 0: none did */
	__u32 length;          /* bytes, with the link header */
	__be16 ethertype;
	__u8 src_mac[6];
	__u16 reason;          /* enum drop_reason */
	__u8 kind;             /* enum event_kind */
	__u8 verdict;          /* enum event_verdict */
	__u8 direction;        /* enum direction */
	__u8 proto;
	__u8 tcp_flags;
	__u8 icmp_type;
};
_Static_assert(sizeof(struct event) == 144, "event");

/* A reader's place. Place 0 is nobody's: its `until` is the latest of all. */
struct reader {
	__u32 until;  /* seconds of 2^30 ns: who does not renew it counts as gone */
	__u32 sample; /* of the flows that pass, one of so many is told; 0 and 1: all */
};

/* How many events an endpoint caused in a second, on one CPU. */
struct event_rate {
	__u32 second;
	__u32 count;
};

/* What one CPU's programs told and could not tell. */
struct event_counts {
	struct event_rate rate;
	__u64 told;
	__u64 limited;             /* held back by the limits */
	__u64 lost[EVENT_READERS]; /* a reader's ring was full */
};

/* One CPU's room to put an event together in: the stack has none. */
struct event_room {
	struct event event;
	struct event_counts counts;
	struct event_rate stopped;  /* of those kept in mst_stopped */
	__u64 next;                 /* its next slot */
	__u32 pkt[24];              /* struct pkt of lib/parse.h */
};

/* ---- the node ----------------------------------------------------------- */

/* The one element of the meta table: who wrote these tables. */
struct meta {
	__u32 layout;           /* MST_LAYOUT */
	__u32 next_generation;  /* last generation handed out to an endpoint */
	__u32 next_backend;     /* last backend id */
	__u32 next_service;     /* last slots id */
	__u8 build[32];         /* hash of the loaded programs */
};

/* By which the sender's program vouches for a packet: of each word that it vouches for, and a start, the factors
 * of two hashes. */
#define VOUCHER_WORDS 12
struct voucher_key {
	__u64 words[VOUCHER_WORDS][2];
};

enum node_flag {
	NODE_EBPF = 1, /* between pods and the wire programs forward, not the host's stack */
	NODE_MASQUERADE = 2, /* programs masquerade, not the host's stack */
};

/* The one element of the node table: this node's own. */
struct node_config {
	__u32 flags;    /* enum node_flag */
	__u32 overlay;  /* ifindex of the tunnel's device, 0: none */
	__u32 vni;
	__be16 port;    /* UDP, of the tunnel */
	__u16 pad;
	__u32 key;      /* by lot: marks a packet that the tunnel's device was checked for already */
	__u32 gather;   /* ifindex of the device behind which datagrams are put together, 0: nowhere (lib/frag.h) */
	struct addr ip4; /* on the wire between nodes; zero when it has none */
	struct addr ip6;
};
_Static_assert(sizeof(struct node_config) == 56, "node_config");

/* The reference of all that is outside: a pod's flow to it goes by the way that the routing table names, as
 * one to another node's pod (lib/masquerade.h). In slot 0, which no node has, while the programs forward it. */
enum remote_ref {
	REMOTE_OUTSIDE = 65536,
};

enum remote_flag {
	REMOTE_TUNNEL = 1, /* its pods are reached through the tunnel */
};

/* Another node. ref is its slot, and in the upper half a number that tells it from others that
 * had the slot: never 0 while the slot is in use. */
struct remote {
	__u32 ref;
	__u32 flags;      /* enum remote_flag */
	struct addr addr; /* where the tunnel to it ends */
	__u8 mac[6];      /* of its tunnel's device */
	__u8 pad[2];
};
_Static_assert(sizeof(struct remote) == 32, "remote");

/* A network; IPv4's length counts from the start of ::ffff:0:0/96. */
struct prefix {
	__u32 length;
	__u8 addr[16]; /* struct addr, which would be aligned to 8 bytes */
};
_Static_assert(sizeof(struct prefix) == 20, "prefix");
enum edge_side {
	EDGE_WIRE = 0,
	EDGE_TUNNEL = 1, /* to nodes that are reached through it; its ports are EDGE_WIRE's */
	EDGE_SIDES = 2,
};

/* An element of mst_edge: how the node appears to a backend. */
struct edge_config {
	struct addr ip4; /* wears it for clients that do not keep theirs; zero when it has none */
	struct addr ip6;
	__u16 port_first; /* source ports for that, which the host leaves alone */
	__u16 port_count;
	__u32 door;       /* of EDGE_WIRE: ifindex of the door's outer end (lib/edge.h); 0: there is none */
};
_Static_assert(sizeof(struct edge_config) == 40, "edge_config");

/* A device that leads to the outside, and the addresses that pods wear behind it; zero when it has none. */
struct wear {
	struct addr ip4;
	struct addr ip6;
	__u32 answers; /* enum wear_answers */
	__u32 pad;
};
_Static_assert(sizeof(struct wear) == 40, "wear");

/* Whether answers to pods' own addresses are taken into pods there (netdev.bpf.c). */
enum wear_answers {
	WEAR_ANSWERS = 1,
};

/* What the entry of a network of addresses says besides, where IPv4's lie among IPv6's. */
enum net_flag {
	NET_IPV6_ONLY = 2, /* the network is one of IPv6, and so wide that all of IPv4 lies in it */
};

/* A destination towards which the pods of a group keep their own addresses. The bits that count begin at group. */
#define INSIDE_ALL 0 /* instead of a group: all of them */
struct inside_key {
	__u32 prefixlen;
	__u32 group; /* a hash of all its destinations, never 0 */
	struct addr addr;
};
_Static_assert(sizeof(struct inside_key) == 24, "inside_key");

/* Where a program decided to send a packet; exported in cb[CB_REDIRECT_KIND]. */
enum redirect_kind {
	REDIRECT_NONE = 0,
	REDIRECT_PEER = 1,    /* into the pod behind a host end */
	REDIRECT_INGRESS = 2, /* back into the interface it came from */
	REDIRECT_EGRESS = 3,  /* out of a host end, through its own program */
	REDIRECT_NEIGH = 4,   /* out of a NIC, to the neighbour that the routing table names */
};

/* Words of skb->cb that the programs use. */
enum cb_word {
	CB_ENDPOINT = 0, /* whose hook it is: 0 at the node's devices */
	CB_VOUCHER = 0, /* on the way to another pod's hook: half of the sender's voucher (lib/voucher.h) */
	CB_TUNNEL = 0, /* before that is known, at the NIC: enum wire_maybe */
	CB_REDIRECT_IFINDEX = 1,
	CB_REDIRECT_KIND = 2,
	CB_REASON = 3,
	CB_ANSWER = 4, /* answer_key on an answer that goes out of the host end */
	CB_VOUCHER_REST = 4,
	CB_REMOTE = 4, /* of a packet from the wire: the node that sent it by the tunnel, or 0 */
	CB_WAY = 4,    /* of a packet from a pod or at the edge: where the way of its flow's packets is kept (lib/way.h), or 0 */
};

/* What a packet at the NIC may be. */
enum wire_maybe {
	WIRE_POD = 0,     /* for a pod */
	WIRE_TUNNEL = 1,  /* in the tunnel, to this node */
	WIRE_OR_EDGE = 2, /* for a pod, or else the edge's */
};

/* Slots of the program table that entry programs call. */
enum pod_program {
	PROG_FROM_POD_HOST = 0,
	PROG_TO_POD_HOST = 1,
	PROG_FROM_POD_INNER = 2,
	PROG_TO_POD_INNER = 3,
	PROG_FROM_POD_NETKIT = 4,
	PROG_TO_POD_NETKIT = 5,
	PROG_TO_POD_WIRE = 6, /* from a NIC straight into a pod behind a host end */
	PROG_TO_POD_EDGE = 7, /* from the edge, likewise */
	PROG_COUNT = 8,
};

/* What the small programs at the node's own devices call when there is something to do. */
enum node_program {
	NODE_PROG_NETDEV_IN = 0,
	NODE_PROG_EDGE_IN = 1,
	NODE_PROG_EDGE_IN_TUNNEL = 2, /* of EDGE_TUNNEL */
	NODE_PROG_EDGE_IN_DOOR = 3,
	NODE_PROG_EDGE_OUT = 4,
	NODE_PROG_COUNT = 5,
};
