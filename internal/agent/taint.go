// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"
	"time"
)

// taint is what becomes of the startup taint, which the agent takes off its node. The API server may be slow to answer, and what is applied
// meanwhile does not wait for it.
type taint struct {
	ended  chan error // what came of a try; has room for it
	tried  bool       // one is under way
	failed error      // what came of the last
	off    time.Time  // when the taint was taken off
}

// taintNews is how long the watch may take to tell that the startup taint is off. Who takes
// it off twice is refused.
const taintNews = 10 * time.Second

// untaint begins a try where one is needed and none is under way, and says what came of the last.
func (s *syncer) untaint(ctx context.Context) error {
	t, name, key := &s.taint, s.a.config.Node, s.a.config.StartupTaint
	self := s.a.watch.Nodes.Get(s.a.nodeKey())
	if key == "" || self == nil || t.tried || time.Since(t.off) < taintNews {
		return t.failed
	}
	at := slices.Index(self.Taints, key)
	if at < 0 { // whoever took it off
		t.failed = nil
		return nil
	}
	t.tried = true
	go func() { t.ended <- s.a.client.RemoveTaint(ctx, name, key, at) }()
	return t.failed
}

// untainted takes in what came of a try.
func (s *syncer) untainted(err error) {
	s.taint.tried, s.taint.failed = false, err
	if err == nil {
		s.taint.off = time.Now()
		s.a.log.Info("the startup taint is off", "taint", s.a.config.StartupTaint)
	}
}
