// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
)

// A pod's programs are settled when none has come or gone for settleQuiet, one
// pod after the other, settlePause apart.
const (
	settleQuiet = 5 * time.Second
	settlePause = time.Second
	// reattachPause is how often the agent looks whether programs are of its build, whether
	// all pods have them, and those that are masqueraded the rules for it.
	reattachPause = 30 * time.Second
)

// upkeep is what the agent looks at again and again: what is wrong there is tried again with that.
// Of each only since when it fails is kept.
type upkeep struct{ upgrade, reattach, masquerade, devices retrying }

// keeps notes how that went. sentence: what has not been possible, and what becomes of that.
func (a *Agent) keeps(r *retrying, err error, sentence string) {
	if err == nil {
		r.failed.Store(nil)
		return
	}
	r.note(time.Now())
	a.metrics.failures.Inc()
	a.log.Error(sentence, "error", err)
}

// settle gives pods, once they have started, the attachment that costs packets
// least. The engine is lent only before and after the wait for the kernel.
func (a *Agent) settle(ctx context.Context) error {
	var looked time.Time
	for pause := settlePause; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if time.Since(looked) >= reattachPause {
			a.upgrade(ctx)
			a.reattach(ctx)
			a.restoreMasquerade(ctx)
			_ = a.lookAtDevices(ctx) // which has told of it
			looked = time.Now()
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
	s.Attach()
	return a.with(context.WithoutCancel(ctx), func(e *engine.Engine) error { return e.Settled(s) })
}

// upgrade replaces the programs of the agent before, if that was another build.
func (a *Agent) upgrade(ctx context.Context) {
	upgraded, moved := false, false
	err := a.with(ctx, func(e *engine.Engine) (err error) {
		if upgraded, err = e.Upgrade(); err == nil {
			moved, err = e.MoveSockets()
		}
		return err
	})
	if ctx.Err() != nil {
		return
	}
	a.keeps(&a.kept.upgrade, err, "programs of another build, or at another cgroup-root, could not be replaced; it is tried again")
	if upgraded && err == nil {
		a.log.Info("another build's programs have been replaced")
	}
	if moved && err == nil {
		a.log.Info("sockets are led to Services by the cgroup-root of now", "cgroup-root", a.config.CgroupRoot)
	}
}

// reattach puts programs back that somebody has taken off pods' interfaces.
func (a *Agent) reattach(ctx context.Context) {
	err := a.with(ctx, func(e *engine.Engine) error {
		back, err := e.Reattach()
		for _, ep := range back {
			a.log.Warn("a pod's programs had been taken off its interface, and are back", "endpoint", ep.ID, "pod", ep.Pod.Namespace+"/"+ep.Pod.Name, "netns", ep.Netns)
		}
		return err
	})
	if ctx.Err() == nil {
		a.keeps(&a.kept.reattach, err, "pods may be without their programs, which somebody has taken off; it is tried again")
	}
}

// restoreMasquerade brings back what a flush of all nftables has taken from pods.
func (a *Agent) restoreMasquerade(ctx context.Context) {
	restored := false
	err := a.with(ctx, func(e *engine.Engine) (err error) {
		restored, err = e.RestoreMasquerade(func() (bool, error) { return cni.RestoreMasquerade(a.config.scope()) })
		return err
	})
	if ctx.Err() != nil {
		return
	}
	a.keeps(&a.kept.masquerade, err, "masqueraded pods may be without the rules for it; it is tried again")
	if restored && err == nil {
		a.log.Warn("the nftables rules for masquerade had been removed, and are back")
	}
}
