/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Why a packet was dropped. Append only: a number, once given, keeps its
 * meaning. Each line carries the sentence people read; Go's table is generated
 * from the comments.
 */
#pragma once

enum drop_reason {
	REASON_NONE = 0,               /* not dropped */
	REASON_NO_PROGRAM = 1,         /* the shared program is not loaded; run `mustang status` */
	REASON_NO_ENDPOINT = 2,        /* the interface has no endpoint entry; run `mustang ep ls` */
	REASON_ETHERTYPE = 3,          /* neither IPv4, IPv6 nor ARP */
	REASON_TRUNCATED = 4,          /* the packet ends inside a header */
	REASON_BAD_LENGTH = 5,         /* a length field contradicts the packet */
	REASON_BAD_HEADER = 6,         /* a header field has a value its standard forbids */
	REASON_EXT_HEADERS = 7,        /* more IPv6 extension headers than are followed (6) */
	REASON_SPOOFED_MAC = 8,        /* the source MAC address is not the pod's */
	REASON_SPOOFED_ADDRESS = 9,    /* the source address is not the pod's */
	REASON_FRAG_TINY = 10,         /* the first fragment does not hold the transport header */
	REASON_FRAG_OVERLAP = 11,      /* a later fragment would overwrite the transport header */
	REASON_FRAG_NO_FIRST = 12,     /* a fragment came before its first one */
	REASON_NO_BACKEND = 13,        /* the Service has no backend */
	REASON_SERVICE_PORT = 14,      /* the address is a Service's, but not this port and protocol */
	REASON_MIDSTREAM_NAT = 15,     /* a packet in the middle of a translated flow whose entry is gone */
	REASON_CT_FULL = 16,           /* the flow table took no new entry */
	REASON_NAT_PORTS = 17,         /* no free source port for a translated flow */
	REASON_NAT_FAILED = 18,        /* rewriting the packet failed */
	REASON_DELIVER = 19,           /* handing the packet to the pod failed */
	REASON_ICMP_ERROR_NAT = 20,    /* an ICMP error about a translated flow could not be translated */
	REASON_ICMP_ERROR_FLOW = 21,   /* an ICMP error about a flow that is not known */
	REASON_UNKNOWN_CHILD = 22,     /* a child of the parent link that is no endpoint sent it: not made by mustang */
	REASON_HOOK_BYPASSED = 23,     /* it left the pod past the program on the pod's own interface */
	REASON_WIRE_SPOOFED = 24,      /* it came in from the wire with the address of a pod of this node */
	REASON_TUNNEL_PEER = 25,       /* it came by the tunnel from an address that is no node's; run `mustang node ls` */
	REASON_TUNNEL_SOURCE = 26,     /* it came by the tunnel from an address that is not of the sending node's pods */
	REASON_TUNNEL_VNI = 27,        /* it came by the tunnel with another network's number (VNI) */
	REASON_NO_REMOTE = 28,         /* it was sent into the tunnel, and no node has its destination */
	REASON_ENCAP = 29,             /* pushing the tunnel's headers failed */
	REASON_NO_LOCAL_BACKEND = 30,  /* the Service's traffic policy is Local, and this node has no backend of it */
	REASON_SOURCE_RANGE = 31,      /* the client's address is in none of the Service's loadBalancerSourceRanges */
	REASON_NO_ROUTE = 32,          /* no route for a packet of a client outside; `ip route get` says where it would go */
	REASON_COUNT = 33,
};
