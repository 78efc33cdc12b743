// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
)

// RemoveTaint takes the taint with this key, the at-th, off a node. When it is
// not at that place any more, nothing changes, and that is an error: look again.
func (c *Client) RemoveTaint(ctx context.Context, node, key string, at int) error {
	type step struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value string `json:"value,omitempty"`
	}
	path := fmt.Sprintf("/spec/taints/%d", at)
	patch, err := json.Marshal([]step{{"test", path + "/key", key}, {"remove", path, ""}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	if err := c.core.Patch(types.JSONPatchType).Resource("nodes").Name(node).Body(patch).Do(ctx).Error(); err != nil {
		return fmt.Errorf("take the taint %s off node %s: %w", key, node, err)
	}
	return nil
}
