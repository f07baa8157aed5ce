//! The way to a thread that carries streams.

use std::{io, net::TcpStream, sync::Arc};

use parking_lot::Mutex;

use crate::{bell::Bell, bundle::Bundle};

/// Something for a thread to do.
pub(crate) enum Mail {
    /// Open a stream of a bundle.
    Open { bundle: Arc<Bundle>, index: usize },
    /// Take a stream of a peer's.
    InboundStream { stream: TcpStream, instance: u64 },
    /// Tell a peer that receives are posted.
    Posted { instance: u64, flow: u64, posted: u64 },
}

/// The way to a thread.
pub(crate) struct Port {
    bell: Arc<Bell>,
    mail: Mutex<Vec<Mail>>,
}

impl Port {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { bell: Arc::new(Bell::new()?), mail: Mutex::default() })
    }

    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    pub(crate) fn send(&self, mail: Mail) {
        self.mail.lock().push(mail);
        self.bell.ring();
    }

    /// The thread takes its mail.
    pub(crate) fn take(&self) -> Vec<Mail> {
        self.bell.clear();
        std::mem::take(&mut *self.mail.lock())
    }
}
