// SPDX-License-Identifier: Apache-2.0

// This file makes a cluster's certificates and kubeconfigs.

package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  string
}

// identity is a certificate with its key, in PEM.
type identity struct{ cert, key string }

const validity = 365 * 24 * time.Hour

func newAuthority(name string) (*authority, error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	a := &authority{cert: template}
	id, err := a.sign(template)
	if err != nil {
		return nil, err
	}
	a.pem = id.cert
	block, _ := pem.Decode([]byte(id.cert))
	if a.cert, err = x509.ParseCertificate(block.Bytes); err != nil {
		return nil, err
	}
	return a, nil
}

// issue makes a certificate that serves and connects. Kubernetes takes the
// user's name from the common name and the groups from the organizations.
func (a *authority) issue(user, group string, hosts ...string) (identity, error) {
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: user},
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if group != "" {
		template.Subject.Organization = []string{group}
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return a.sign(template)
}

// sign makes a key and a certificate for it; the authority's first one is its own.
func (a *authority) sign(template *x509.Certificate) (identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return identity{}, err
	}
	if a.key == nil {
		a.key = key
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return identity{}, err
	}
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(validity)
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return identity{}, err
	}
	keyPEM, err := encodeKey(key)
	return identity{cert: encode("CERTIFICATE", der), key: keyPEM}, err
}

func encodeKey(key *ecdsa.PrivateKey) (string, error) {
	der, err := x509.MarshalECPrivateKey(key)
	return encode("EC PRIVATE KEY", der), err
}

func encode(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

// kubeconfig holds the certificates themselves, so that it can be copied to
// anywhere.
func kubeconfig(server string, ca *authority, id identity) string {
	b64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: kube, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: me, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: kube, context: {cluster: kube, user: me}}]
current-context: kube
`, server, b64(ca.pem), b64(id.cert), b64(id.key))
}

// makePKI writes every machine's /etc/kubernetes and the kubeconfig for this
// machine, whose certificates it returns for our own requests.
func (c *cluster) makePKI() (*authority, identity, error) {
	fail := func(err error) (*authority, identity, error) {
		return nil, identity{}, fmt.Errorf("make certificates: %w", err)
	}
	ca, err := newAuthority("kubernetes")
	if err != nil {
		return fail(err)
	}
	front, err := newAuthority("front-proxy")
	if err != nil {
		return fail(err)
	}
	admin, err := ca.issue("admin", "system:masters")
	if err != nil {
		return fail(err)
	}
	p := &pkiWriter{c: c}
	p.write(c.kubeconfig(), kubeconfig(fmt.Sprintf("https://127.0.0.1:%d", c.Port), ca, admin))
	for _, machine := range c.Config.machines() {
		p.file(machine, "ca.crt", ca.pem)
		p.file(machine, "admin.conf", kubeconfig(apiServer, ca, admin))
	}

	caKey, err := encodeKey(ca.key)
	if err != nil {
		return fail(err)
	}
	p.file(ControlPlane, "ca.key", caKey)
	p.file(ControlPlane, "front-proxy-ca.crt", front.pem)
	p.pair(ControlPlane, "apiserver", ca, "kube-apiserver", "",
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
		"localhost", "127.0.0.1", controlPlane4.String(), controlPlane6.String(), kubernetesIP)
	p.pair(ControlPlane, "apiserver-kubelet-client", ca, "kube-apiserver-kubelet-client", "system:masters")
	p.pair(ControlPlane, "front-proxy-client", front, "front-proxy-client", "")
	p.conf(ControlPlane, "controller-manager.conf", ca, "system:kube-controller-manager", "")
	p.conf(ControlPlane, "scheduler.conf", ca, "system:kube-scheduler", "")
	p.serviceAccountKey()
	for _, node := range c.Config.nodes() {
		p.pair(node, "kubelet", ca, "system:node:"+node, "system:nodes", node, address4(node).String(), address6(node).String())
		p.conf(node, "kubelet.conf", ca, "system:node:"+node, "system:nodes")
		p.conf(node, "kube-proxy.conf", ca, "system:kube-proxy", "")
	}
	if p.err != nil {
		return fail(p.err)
	}
	return ca, admin, nil
}

// pkiWriter writes files; its first error sticks.
type pkiWriter struct {
	c   *cluster
	err error
}

func (p *pkiWriter) write(path, content string) {
	if p.err == nil {
		p.err = writeFile(path, content, 0o600)
	}
}

func (p *pkiWriter) file(machine, name, content string) {
	p.write(p.c.path(machine, "kubernetes", name), content)
}

func (p *pkiWriter) issue(ca *authority, user, group string, hosts ...string) identity {
	id, err := ca.issue(user, group, hosts...)
	if p.err == nil {
		p.err = err
	}
	return id
}

func (p *pkiWriter) pair(machine, name string, ca *authority, user, group string, hosts ...string) {
	id := p.issue(ca, user, group, hosts...)
	p.file(machine, name+".crt", id.cert)
	p.file(machine, name+".key", id.key)
}

func (p *pkiWriter) conf(machine, name string, ca *authority, user, group string) {
	p.file(machine, name, kubeconfig(apiServer, ca, p.issue(ca, user, group)))
}

// serviceAccountKey is what tokens of pods are signed with.
func (p *pkiWriter) serviceAccountKey() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		p.err = err
		return
	}
	private, err := encodeKey(key)
	if err != nil {
		p.err = err
		return
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		p.err = err
		return
	}
	p.file(ControlPlane, "sa.key", private)
	p.file(ControlPlane, "sa.pub", encode("PUBLIC KEY", public))
}
