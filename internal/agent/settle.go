// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/mustang-net/mustang/internal/engine"
)

// A pod's programs are settled when none has come or gone for settleQuiet, one
// pod after the other, settlePause apart.
const (
	settleQuiet = 5 * time.Second
	settlePause = time.Second
)

// settle gives pods, once they have started, the attachment that costs packets
// least. The engine is lent only before and after the wait for the kernel.
func (a *Agent) settle(ctx context.Context) error {
	for pause := settlePause; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = settlePause
		if err := a.settleOne(ctx); err != nil && ctx.Err() == nil {
			a.log.Warn("a pod's programs stay attached as at its start, for now", "error", err)
			pause = retryMost
		}
	}
}

func (a *Agent) settleOne(ctx context.Context) error {
	var s *engine.Settling
	err := a.with(ctx, func(e *engine.Engine) (err error) {
		s, err = e.Settle(settleQuiet)
		return err
	})
	if err != nil || s == nil {
		return err
	}
	if err := s.Attach(); err != nil {
		s.Abandon()
		return err
	}
	return a.with(context.WithoutCancel(ctx), func(e *engine.Engine) error { return e.Settled(s) })
}
