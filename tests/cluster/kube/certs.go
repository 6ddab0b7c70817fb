package main

import (
	"bufio"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// pair is a certificate with its private key.
type pair struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

// writeCertificates writes NAME.crt and NAME.key into a folder for each line of the form
// "AUTHORITY/NAME|common name|organisation|subject alternative names, separated by commas". The
// authority signs the certificate: "ca/admin" is signed by ca.crt. An authority is created when a
// line first names it. It also writes sa.key and sa.pub, the keys of service account tokens.
func writeCertificates(folder string, requests io.Reader) error {
	if err := writeTokenKeys(folder); err != nil {
		return err
	}
	authorities := map[string]*pair{}
	lines := bufio.NewScanner(requests)
	for lines.Scan() {
		fields := strings.Split(lines.Text(), "|")
		if len(fields) != 4 {
			return fmt.Errorf("certs: %q does not have four fields", lines.Text())
		}
		issuer, name, found := strings.Cut(fields[0], "/")
		if !found {
			return fmt.Errorf("certs: %q names no authority", fields[0])
		}
		if authorities[issuer] == nil {
			made, err := issue(folder, issuer, authority(issuer), nil)
			if err != nil {
				return err
			}
			authorities[issuer] = made
		}
		template := leaf(fields[1], fields[2], fields[3])
		if _, err := issue(folder, name, template, authorities[issuer]); err != nil {
			return err
		}
	}
	return lines.Err()
}

func authority(name string) *x509.Certificate {
	return &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
}

func leaf(commonName, organisation, names string) *x509.Certificate {
	template := &x509.Certificate{
		Subject:  pkix.Name{CommonName: commonName},
		KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{
			x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth,
		},
	}
	if organisation != "" {
		template.Subject.Organization = []string{organisation}
	}
	for _, name := range strings.FieldsFunc(names, func(r rune) bool { return r == ',' }) {
		if address := net.ParseIP(name); address != nil {
			template.IPAddresses = append(template.IPAddresses, address)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	return template
}

// issue signs the template with the issuer's key, or with its own if issuer is nil, and writes the
// certificate and the key.
func issue(folder, name string, template *x509.Certificate, issuer *pair) (*pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return nil, err
	}
	// Valid since an hour ago, because the clocks of nodes and clients may differ.
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = template.NotBefore.AddDate(1, 0, 0)
	if issuer == nil {
		issuer = &pair{template, key}
	}
	signed, err := x509.CreateCertificate(
		rand.Reader, template, issuer.certificate, key.Public(), issuer.key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(signed)
	if err != nil {
		return nil, err
	}
	if err := writePEM(folder, name+".crt", "CERTIFICATE", signed); err != nil {
		return nil, err
	}
	return &pair{certificate, key}, writeKey(folder, name+".key", key)
}

func writeTokenKeys(folder string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := writePEM(folder, "sa.pub", "PUBLIC KEY", public); err != nil {
		return err
	}
	return writeKey(folder, "sa.key", key)
}

func writeKey(folder, file string, key crypto.Signer) error {
	encoded, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(folder, file, "PRIVATE KEY", encoded)
}

func writePEM(folder, file, kind string, content []byte) error {
	block := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content})
	return os.WriteFile(filepath.Join(folder, file), block, 0o600)
}
