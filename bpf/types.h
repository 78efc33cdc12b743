/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Shared types: what the programs and the Go side both read and write.
 * C owns them; Go's are generated. Padding is explicit and zeroed, because
 * map keys are compared byte by byte.
 */
#pragma once

#include <linux/types.h>

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
	DIR_COUNT = 4,
};

/* ---- endpoints ------------------------------------------------------- */

enum endpoint_flag {
	EP_HOST_END = 1,       /* programs sit on the host's end; redirect_peer delivers */
	EP_IN_POD = 2,         /* programs sit inside the pod, directions swapped */
	EP_SERVICE_TC = 4,     /* Services by NAT at the tc hooks */
	EP_SERVICE_SOCKET = 8, /* Services at connect() and sendmsg() */
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
	__u8 mac[6];        /* the pod's interface */
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

/* ---- Services --------------------------------------------------------- */

/* proto 0 and port 0: the address itself is a Service's (see SVC_ADDRESS). */
struct service_key {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 scope; /* 0; reserved for local-only frontends */
	__u32 pad;
};
_Static_assert(sizeof(struct service_key) == 24, "service_key");

enum service_flag {
	SVC_ADDRESS = 1, /* marks an address that has frontends; has no backends itself */
};

struct service {
	__u32 id;       /* of the backend slots */
	__u32 backends; /* slots 0 .. backends-1 are filled */
	__u16 flags;    /* enum service_flag */
	__u8 owner;     /* enum owner */
	__u8 pad;
	__u32 number;   /* what `svc ls` shows as id; stays when backends change */
};
_Static_assert(sizeof(struct service) == 16, "service");

struct slot_key {
	__u32 service; /* struct service.id */
	__u32 slot;
};

struct backend {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 flags;
	__u32 pad;
};
_Static_assert(sizeof(struct backend) == 24, "backend");

/* Ids that no backend has. */
enum backend_id {
	BACKEND_NONE = 0,
	BACKEND_LEFT = 0xffffffff, /* of a half-open flow: it left the Service, so the next SYN picks another */
};

/* ---- flow state ------------------------------------------------------- */

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
};

enum ct_closing {
	CT_FIN = 1,
	CT_RST = 2,
};

/* What was decided about one end of the flow, and when. endpoint 0: not on this node. */
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
	__u8 pad1[2];
	struct ct_end opener;
	struct ct_end responder;
	__u32 backend;      /* id, or enum backend_id */
	struct tuple other; /* the other half's tuple in the flow's original direction */
};
_Static_assert(sizeof(struct ct_entry) == 72, "ct_entry");

/* How packets of a flow pass a hook. */
enum fast_flag {
	FAST_TO_POD = 1,      /* the hook is to_pod, else from_pod */
	FAST_FROM_OPENER = 2, /* they go in the flow's original direction */
	FAST_DELIVER = 4,     /* to the endpoint at the other end; else they are left to the kernel */
	FAST_TRANSLATE = 8,
};

/* What was decided about a flow's packets at one hook, and what must still be so for it to hold.
 * All that is compared lies in the first 64 bytes. */
struct fast_flow {
	struct tuple t;        /* as packets show it; pad is the hook: endpoint << 1 | direction */
	__u32 until;           /* the time, as in ct_entry; then the flow's entry is looked at again */
	__u32 generation;      /* of the tables, the hook's endpoint and the flow, mixed */
	__u32 peer;            /* id of the endpoint at the flow's other end, 0: none of this node */
	__u32 peer_generation;
	__u8 mac[6];           /* the sender's link address */
	__u8 proto;
	__u8 flags;            /* enum fast_flag */
	struct tuple to;       /* what the packet's tuple becomes */
	__u64 pad[3];
};
_Static_assert(sizeof(struct fast_flow) == 128, "fast_flow");

struct frag_key {
	struct addr src;
	struct addr dst;
	__u32 id;
	__u8 proto;
	__u8 pad[3];
};
struct frag_ports {
	__be16 sport;
	__be16 dport;
	__u32 expires;
	__u8 proto; /* of the transport header */
	__u8 pad[3];
};

struct facts {
	__u32 shadowed; /* 1: a flow was entered with CT_SCOPE_SHADOW */
	__u32 pad;
};

/* How many refusals were sent in a second, on one CPU. */
struct refusals {
	__u32 second;
	__u32 count;
};

/* ---- Services at the socket ------------------------------------------- */

/* What a connected socket was told, and where it really goes. Lives with the socket. */
struct sock_peer {
	struct addr frontend;
	struct addr backend_addr;
	__be16 frontend_port;
	__be16 backend_port;
	__u32 backend; /* id */
	__u32 service; /* struct service.number */
	__u32 pad;
};
_Static_assert(sizeof(struct sock_peer) == 48, "sock_peer");

/* A socket of mst_sock_peers as the iterator writes it: enough to name it to sock_diag(7). */
struct sock_seen {
	__u64 netns_cookie;
	__u64 cookie;
	struct addr local;
	struct addr remote; /* where it is connected now */
	__be16 local_port;
	__be16 remote_port;
	__u32 bound_if;
	__u16 family;
	__u8 proto;
	__u8 pad[5];
	struct sock_peer peer;
};
_Static_assert(sizeof(struct sock_seen) == 112, "sock_seen");

/* Unconnected UDP: which backend a socket's datagrams to an address go to, and the way back. */
struct sock_flow_key {
	__u64 cookie;
	struct addr addr;
	__be16 port;
	__u8 reverse; /* 0: addr is the frontend; 1: addr is the backend */
	__u8 pad[5];
};
struct sock_flow {
	struct addr addr;
	__be16 port;
	__u16 pad;
	__u32 backend;
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

/* Where a program decided to send a packet; exported in cb[CB_REDIRECT_KIND]. */
enum redirect_kind {
	REDIRECT_NONE = 0,
	REDIRECT_PEER = 1,    /* into the pod behind a host end */
	REDIRECT_INGRESS = 2, /* back into the interface it came from */
	REDIRECT_EGRESS = 3,  /* out of a host end, through its own program */
};

/* Words of skb->cb that the programs use. */
enum cb_word {
	CB_ENDPOINT = 0,
	CB_REDIRECT_IFINDEX = 1,
	CB_REDIRECT_KIND = 2,
	CB_REASON = 3,
	CB_ANSWER = 4, /* answer_key on an answer that goes out of the host end */
};

/* Slots of the program table that entry programs call. */
enum pod_program {
	PROG_FROM_POD_HOST = 0,
	PROG_TO_POD_HOST = 1,
	PROG_FROM_POD_INNER = 2,
	PROG_TO_POD_INNER = 3,
	PROG_FROM_POD_NETKIT = 4,
	PROG_TO_POD_NETKIT = 5,
	PROG_COUNT = 6,
};
