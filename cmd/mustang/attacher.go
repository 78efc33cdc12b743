// SPDX-License-Identifier: Apache-2.0

package main

// What `pod` needs of the engine.

import (
	"context"
	"errors"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/state"
)

func init() {
	openAttacher = func(g *globals) (endpointAttacher, error) {
		e, err := g.open(context.Background(), false)
		if err != nil {
			return nil, err
		}
		return engineAttacher{e}, nil
	}
}

type engineAttacher struct{ *engine.Engine }

func (a engineAttacher) AddEndpoint(ctx context.Context, made state.Endpoint, pod podSpec) error {
	_, err := a.Engine.AddEndpoint(ctx, engine.EndpointSpec{Owner: state.OwnerCLI, ServicePath: pod.servicePath, Made: &made,
		Labels: pod.labels, Ports: pod.ports, Pod: pod.ref, Masquerade: pod.masquerade})
	return err
}

func (a engineAttacher) RemoveEndpoint(_ context.Context, netnsPath, ifname string) error {
	id, err := a.FindEndpoint(netnsPath, ifname)
	if errors.Is(err, engine.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return a.Engine.RemovePod(id)
}
