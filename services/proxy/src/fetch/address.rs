//! The IP addresses of the public internet.
//!
//! Sources: IANA's special-purpose registries for IPv4 (iana.org/assignments/iana-ipv4-special-registry) and IPv6
//! (…/iana-ipv6-special-registry). An address that carries an IPv4 address inside is judged by that one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The reason for which an address is not reachable for a client's URL; `None` for a public one.
pub(super) fn not_public(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(v4) => not_public_v4(v4),
        IpAddr::V6(v6) => not_public_v6(v6),
    }
}

fn not_public_v4(a: Ipv4Addr) -> Option<&'static str> {
    match a.octets() {
        [0, ..] => Some("unspecified"),
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => Some("private"),
        [100, 64..=127, ..] => Some("shared by a carrier (CGNAT)"),
        [127, ..] => Some("loopback"),
        [169, 254, ..] => Some("link-local"),
        // A cloud's platform service at a public address.
        [168, 63, 129, 16] => Some("a metadata service"),
        [192, 0, 0, _] | [192, 88, 99, _] | [198, 18..=19, ..] => Some("reserved"),
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => Some("for documentation"),
        [224..=239, ..] => Some("multicast"),
        [240..=255, ..] => Some("reserved"),
        _ => None,
    }
}

fn not_public_v6(a: Ipv6Addr) -> Option<&'static str> {
    let s = a.segments();
    match s {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("unspecified"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("loopback"),
        // IPv4-mapped, and NAT64 under its well-known prefix.
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => not_public_v4(low_v4(s[6], s[7])),
        [0xfe80..=0xfebf, ..] => Some("link-local"),
        [0xfc00..=0xfdff, ..] => Some("private"),
        [0xff00..=0xffff, ..] => Some("multicast"),
        [0x2002, high, low, ..] => not_public_v4(low_v4(high, low)),
        // Teredo, ORCHID and the rest of the protocol assignments.
        [0x2001, 0..=0x1ff, ..] => Some("reserved"),
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => Some("for documentation"),
        // ISATAP carries an IPv4 address under any prefix.
        [0x2000..=0x3fff, _, _, _, 0 | 0x200, 0x5efe, ..] => not_public_v4(low_v4(s[6], s[7])),
        [0x2000..=0x3fff, ..] => None,
        // Everything else is not handed out; IPv4-compatible and local NAT64 prefixes are among it.
        _ => Some("reserved"),
    }
}

fn low_v4(high: u16, low: u16) -> Ipv4Addr {
    let [a, b] = high.to_be_bytes();
    let [c, d] = low.to_be_bytes();
    Ipv4Addr::new(a, b, c, d)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_pass() {
        let public = [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.216.34",
            "100.63.255.255",
            "100.128.0.0",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.0.1",
            "198.20.0.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450:4001::1",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2002:808:808::1",
        ];
        for address in public {
            assert_eq!(not_public(address.parse().unwrap()), None, "{address}");
        }
        let inside = [
            ("0.0.0.0", "unspecified"),
            ("0.1.2.3", "unspecified"),
            ("10.0.0.1", "private"),
            ("100.64.0.1", "CGNAT"),
            ("100.100.100.200", "CGNAT"),
            ("127.0.0.1", "loopback"),
            ("127.255.255.254", "loopback"),
            ("168.63.129.16", "metadata"),
            ("169.254.169.254", "link-local"),
            ("172.16.0.1", "private"),
            ("172.31.255.255", "private"),
            ("192.0.0.192", "reserved"),
            ("192.168.1.1", "private"),
            ("198.18.0.1", "reserved"),
            ("203.0.113.9", "documentation"),
            ("224.0.0.1", "multicast"),
            ("240.0.0.1", "reserved"),
            ("255.255.255.255", "reserved"),
            ("::", "unspecified"),
            ("::1", "loopback"),
            ("::ffff:127.0.0.1", "loopback"),
            ("::ffff:169.254.169.254", "link-local"),
            ("::127.0.0.1", "reserved"),
            ("64:ff9b::10.0.0.1", "private"),
            ("64:ff9b:1::8.8.8.8", "reserved"),
            ("2002:7f00:1::1", "loopback"),
            ("2002:a00:1::1", "private"),
            ("2001::1", "reserved"),
            ("2001:db8::1", "documentation"),
            ("2600::5efe:127.0.0.1", "loopback"),
            ("2600::200:5efe:10.0.0.1", "private"),
            ("fe80::1", "link-local"),
            ("fec0::1", "reserved"),
            ("fc00::1", "private"),
            ("fd00:ec2::254", "private"),
            ("ff02::1", "multicast"),
            ("4000::1", "reserved"),
        ];
        for (address, why) in inside {
            let found = not_public(address.parse().unwrap());
            assert!(found.is_some_and(|f| f.contains(why)), "{address}: {found:?}");
        }
    }
}
