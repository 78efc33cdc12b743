// SPDX-License-Identifier: Apache-2.0

package run

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/bench/report"
)

// script is what perf script prints: the load in a system call, in softirq below one, in
// its own code; ksoftirqd; and a stranger.
const script = `mustang  10
	ffffffff81000003 tcp_sendmsg
	ffffffff81000002 do_syscall_64
	ffffffff81000001 entry_SYSCALL_64_after_hwframe
	          481234 main.loop

mustang  10
	ffffffff81000005 bpf_prog_0123456789abcdef_from_pod
	ffffffff81000004 handle_softirqs
	ffffffff81000003 tcp_sendmsg
	ffffffff81000002 do_syscall_64

mustang  10
	          481234 main.loop

ksoftirqd/1    22
	ffffffff81000006 net_rx_action
	ffffffff81000007 ret_from_fork

cc1 plus  77
	          480000 parse
`

func TestStacksOfTheLoadAreFolded(t *testing.T) {
	var p report.Profile
	fold(&p, []int{10}, []byte(script))
	got := [3]float64{p.User, p.System, p.Softirq}
	if want := [3]float64{.25, .25, .5}; got != want {
		t.Errorf("user, system, softirq: %v, want %v", got, want)
	}
	want := &report.Frame{Name: "all", Count: 4, Calls: []*report.Frame{
		{Name: "ksoftirqd", Count: 1, Calls: []*report.Frame{{Name: "ret_from_fork", Count: 1, Calls: []*report.Frame{{Name: "net_rx_action", Count: 1}}}}},
		{Name: "load", Count: 3, Calls: []*report.Frame{
			{Name: "tcp_sendmsg", Count: 2, Calls: []*report.Frame{{Name: "handle_softirqs", Count: 1, Calls: []*report.Frame{{Name: "bpf:from_pod", Count: 1}}}}},
			{Name: "user code", Count: 1}}}}}
	if diff := cmp.Diff(want, p.Stack); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if share := p.Stack.Share("handle_softirqs"); share != .25 {
		t.Errorf("softirq has %v of the samples", share)
	}
	fold(&p, nil, nil)
}
