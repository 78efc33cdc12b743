// SPDX-License-Identifier: Apache-2.0

package main

// What is wrong with a file of Services or nodes, in the words of the file.

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/policy/manifest"
)

// wrongEntry is what is wrong with the first of list that is no T, by its number from 1.
func wrongEntry[T any](list []any) error {
	for i, entry := range list {
		if err := within(fmt.Sprintf("entry %d", i+1), wrongFields[T](entry)); err != nil {
			return err
		}
	}
	return nil
}

// within is an error with the place before it; nil stays nil.
func within(place string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", place, err)
}

// wrongFields is what is wrong with v, which is to be a T: its field, and what belongs there.
func wrongFields[T any](v any) error {
	var to T
	text, err := yaml.Marshal(v)
	if err == nil {
		err = yaml.UnmarshalStrict(text, &to)
	}
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		if wrong.Field == "" {
			return errors.New(manifest.Misfit(wrong))
		}
		return fmt.Errorf("%s: %s", wrong.Field, manifest.Misfit(wrong))
	}
	if err != nil {
		if _, name, ok := strings.Cut(err.Error(), "json: unknown field "); ok {
			return fmt.Errorf("unknown field %s; the fields are %s", name, strings.Join(manifest.Fields(reflect.TypeFor[T]()), ", "))
		}
	}
	return err
}
