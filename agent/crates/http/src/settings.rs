//! SETTINGS (RFC 9114 §7.2.4): what each end says of itself, once, at the start of its control stream.

use crate::{
    error::{Code, Error},
    frame, varint,
};

const QPACK_MAX_TABLE_CAPACITY: u64 = 0x01;
const MAX_FIELD_SECTION_SIZE: u64 = 0x06;
const QPACK_BLOCKED_STREAMS: u64 = 0x07;
/// RFC 9220.
const ENABLE_CONNECT_PROTOCOL: u64 = 0x08;
/// RFC 9297.
const H3_DATAGRAM: u64 = 0x33;

/// The longest payload of SETTINGS that is read, in bytes: those of browsers have less than 100.
pub(crate) const MOST_BYTES: u64 = 1024;

/// What an end says of itself, or what it is taken to say if it says nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settings {
    /// The largest field section that the end takes, as RFC 9114 §4.2.2 counts it; `None`: any.
    pub max_field_section_bytes: Option<u64>,
    /// Whether the end, a server, takes `:protocol` with CONNECT (RFC 9220).
    pub extended_connect: bool,
    /// Whether the end takes HTTP datagrams in QUIC's DATAGRAM frames (RFC 9297).
    pub datagrams: bool,
}

impl Settings {
    /// Appends the frame, with settings in the order of their numbers. Those that have their default value are left out, but for QPACK's
    /// table and its blocked streams, which servers commonly name.
    pub fn put(&self, out: &mut Vec<u8>) {
        let mut payload = Vec::new();
        let mut put = |setting, value| {
            varint::put(&mut payload, setting);
            varint::put(&mut payload, value);
        };
        put(QPACK_MAX_TABLE_CAPACITY, 0);
        if let Some(bytes) = self.max_field_section_bytes {
            put(MAX_FIELD_SECTION_SIZE, bytes);
        }
        put(QPACK_BLOCKED_STREAMS, 0);
        if self.extended_connect {
            put(ENABLE_CONNECT_PROTOCOL, 1);
        }
        if self.datagrams {
            put(H3_DATAGRAM, 1);
        }
        frame::put(out, frame::SETTINGS, &payload);
    }

    /// Reads the payload of the frame. Settings that nobody knows are skipped.
    ///
    /// # Errors
    ///
    /// The connection ends: a setting occurs twice, is one of HTTP/2, has a value that it may not have, or is cut off.
    pub fn read(mut payload: &[u8]) -> Result<Self, Error> {
        let wrong = |reason| Error::connection(Code::SettingsError, reason);
        let mut settings = Self::default();
        let mut seen = Vec::new();
        while !payload.is_empty() {
            let pair = varint::take(&mut payload).zip(varint::take(&mut payload));
            let (setting, value) = pair.ok_or(Error::connection(Code::FrameError, "SETTINGS are cut off"))?;
            seen.push(setting);
            let switch = || match value {
                0 => Ok(false),
                1 => Ok(true),
                _ => Err(wrong("a switch among the settings is neither 0 nor 1")),
            };
            match setting {
                MAX_FIELD_SECTION_SIZE => settings.max_field_section_bytes = Some(value),
                ENABLE_CONNECT_PROTOCOL => settings.extended_connect = switch()?,
                H3_DATAGRAM => settings.datagrams = switch()?,
                // RFC 9114 §11.2.2: those of HTTP/2 without a counterpart.
                0x00 | 0x02..=0x05 => return Err(wrong("a setting of HTTP/2")),
                _ => {}
            }
        }
        seen.sort_unstable();
        if seen.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(wrong("a setting occurs twice"));
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_order_out() {
        let settings =
            Settings { max_field_section_bytes: Some(16_384), extended_connect: true, datagrams: true };
        let mut out = Vec::new();
        settings.put(&mut out);
        assert_eq!(out, [4, 13, 1, 0, 6, 0x80, 0, 0x40, 0, 7, 0, 8, 1, 0x33, 1]);
        assert_eq!(Settings::read(&out[2..]), Ok(settings));
        out.clear();
        Settings::default().put(&mut out);
        assert_eq!(out, [4, 4, 1, 0, 7, 0]);
        assert_eq!(Settings::read(&[]), Ok(Settings::default()));
    }

    #[test]
    fn what_others_say() {
        let code = |payload: &[u8]| Settings::read(payload).map_err(Error::code);
        // Grease and a setting of QPACK.
        assert_eq!(code(&[0x40, 0x5f, 7, 1, 0x50, 0x00]), Ok(Settings::default()));
        for (payload, expected) in [
            (&[8, 1, 8, 1][..], Code::SettingsError),
            (&[0x21, 1, 0x21, 2], Code::SettingsError),
            (&[2, 0], Code::SettingsError),
            (&[3, 0], Code::SettingsError),
            (&[4, 0], Code::SettingsError),
            (&[5, 0], Code::SettingsError),
            (&[0, 0], Code::SettingsError),
            (&[8, 2], Code::SettingsError),
            (&[0x33, 0x40, 0xff], Code::SettingsError),
            (&[8], Code::FrameError),
            (&[8, 0x40], Code::FrameError),
        ] {
            assert_eq!(code(payload), Err(expected), "{payload:02x?}");
        }
    }
}
