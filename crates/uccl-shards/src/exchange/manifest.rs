//! The description of a rank that others plan with and read by.

use std::{fmt::Write, net::SocketAddr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use uccl_device::{HostIdentity, Topology};
use uccl_p2p::{Config, Endpoint, Transport};
use uccl_wire::advert::Advert;

use super::{
    error::{Error, Result},
    memory::Memory,
    shard::ShardEntry,
};

/// The number of this format.
const FORMAT: u32 = 2;

/// The description of a rank: its shards, and the keys with which peers read them. Programs carry
/// its bytes from rank to rank.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// Where the rank's endpoint listens.
    pub(crate) address: SocketAddr,
    /// A text that ranks of its host share, if that is known.
    pub(crate) host: Option<String>,
    /// The number of network devices of its host.
    pub(crate) lanes: u32,
    pub(crate) mark: Key,
    pub(crate) taken: Key,
    pub(crate) buffers: Vec<Key>,
    pub(crate) shards: Vec<ShardEntry>,
}

/// An advert; as text, its bytes in hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Key(pub(crate) Advert);

impl Manifest {
    pub(crate) fn of(endpoint: &Endpoint, memory: &Memory) -> Result<Self> {
        Ok(Self {
            format: FORMAT,
            address: endpoint.addr(),
            host: HostIdentity::of_this_process().boot_id,
            lanes: lanes_of(endpoint.config()),
            mark: Key(memory.mark.advert(endpoint)?),
            taken: Key(memory.taken.advert(endpoint)?),
            buffers: memory.adverts(endpoint)?.into_iter().map(Key).collect(),
            shards: memory.shards.clone(),
        })
    }

    /// Its bytes, for peers.
    ///
    /// # Errors
    /// It cannot be written as text.
    pub fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|e| Error::Manifest(e.to_string()))
    }

    /// The manifest in a peer's bytes.
    ///
    /// # Errors
    /// They are something else, or of another version of this library.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|e| Error::Manifest(e.to_string()))?;
        if manifest.format != FORMAT {
            let why = format!("its format is {}, this library reads {FORMAT}", manifest.format);
            return Err(Error::Manifest(why));
        }
        Ok(manifest)
    }
}

/// The number of RDMA devices that an endpoint with these settings may use; 1 without any.
fn lanes_of(config: &Config) -> u32 {
    if !matches!(config.transport, Transport::Auto | Transport::Verbs) {
        return 1;
    }
    let topology = Topology::of_this_machine();
    let active = topology.map_or(0, |it| it.rdma.iter().filter(|one| one.is_active()).count());
    u32::try_from(active).unwrap_or(u32::MAX).max(1)
}

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::new();
        for byte in self.0.encode() {
            write!(text, "{byte:02x}").map_err(serde::ser::Error::custom)?;
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let byte = |pair: &[u8]| {
            let pair = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(pair, 16).ok()
        };
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        let bytes = bytes.ok_or_else(|| D::Error::custom("a key is not hexadecimal"))?;
        Advert::decode(&bytes).map(Self).map_err(D::Error::custom)
    }
}
