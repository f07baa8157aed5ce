//! How the two sides of a benchmark meet: versions, and a shared secret if there is one.

use anyhow::{Context, Result, bail};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::{
    control::{Channel, VERSION},
    role::Role,
};

const NONCE_LEN: usize = 32;

/// The first line of either side.
#[derive(Serialize, Deserialize)]
struct Hello {
    uccl_bench: u32,
    nonce: [u8; NONCE_LEN],
    secret: bool,
    host: String,
}

#[derive(Serialize, Deserialize)]
struct Proof {
    proof: Vec<u8>,
}

/// Greets the other side and returns its name. Nothing that it says is acted on before it has
/// proved that it knows the secret, if this side has one.
pub(crate) fn greet(channel: &mut Channel, role: Role, psk: Option<&[u8]>) -> Result<String> {
    let mut nonce = [0; NONCE_LEN];
    getrandom::fill(&mut nonce).context("the system has no random numbers")?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    channel.send(&Hello { uccl_bench: VERSION, nonce, secret: psk.is_some(), host })?;
    let theirs: Hello = channel.receive()?;
    if theirs.uccl_bench != VERSION {
        bail!(
            "the other side speaks version {} of the benchmark, this one {VERSION}: \
             install one uccl on both",
            theirs.uccl_bench
        );
    }
    match (psk, theirs.secret) {
        (None, false) => Ok(theirs.host),
        (Some(psk), true) => {
            prove(channel, role, psk, &nonce, &theirs.nonce)?;
            Ok(theirs.host)
        }
        _ => bail!("only one side has a secret: set UCCL_P2P_PSK to the same value on both"),
    }
}

fn prove(
    channel: &mut Channel,
    role: Role,
    psk: &[u8],
    mine: &[u8; NONCE_LEN],
    theirs: &[u8; NONCE_LEN],
) -> Result<()> {
    let their_role = if role == Role::Lead { Role::Serve } else { Role::Lead };
    let proof = tag(psk, role, mine, theirs)?.finalize().into_bytes().to_vec();
    channel.send(&Proof { proof })?;
    let Proof { proof } = channel.receive()?;
    let expected = tag(psk, their_role, theirs, mine)?;
    expected.verify_slice(&proof).ok().context("the other side has another UCCL_P2P_PSK")
}

fn tag(
    psk: &[u8],
    role: Role,
    from: &[u8; NONCE_LEN],
    to: &[u8; NONCE_LEN],
) -> Result<Hmac<Sha256>> {
    let mut mac = <Hmac<Sha256>>::new_from_slice(psk).context("UCCL_P2P_PSK cannot be a key")?;
    mac.update(b"uccl bench ");
    mac.update(if role == Role::Lead { b"lead" } else { b"serv" });
    mac.update(from);
    mac.update(to);
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, thread};

    use super::*;

    fn meet(lead: Option<&[u8]>, serve: Option<&[u8]>) -> (Result<String>, Result<String>) {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let channel = |stream: UnixStream| {
            let writer = stream.try_clone().expect("a clone");
            Channel::new(stream.into(), writer.into())
        };
        let (mut a, mut b) = (channel(a), channel(b));
        thread::scope(|scope| {
            // Each hangs up when it is done, as the end of a process would.
            let serve = scope.spawn(move || greet(&mut b, Role::Serve, serve));
            let lead = greet(&mut a, Role::Lead, lead);
            drop(a);
            (lead, serve.join().expect("no panic"))
        })
    }

    #[test]
    fn equal_secrets_meet() {
        for psk in [None, Some(&b"secret"[..])] {
            let (lead, serve) = meet(psk, psk);
            assert_eq!(lead.expect("met"), serve.expect("met"));
        }
    }

    #[test]
    fn unequal_secrets_do_not() {
        for (lead, serve) in
            [(Some(&b"a"[..]), Some(&b"b"[..])), (Some(b"a"), None), (None, Some(b"b"))]
        {
            let (lead, serve) = meet(lead, serve);
            assert!(lead.is_err() && serve.is_err());
        }
    }
}
