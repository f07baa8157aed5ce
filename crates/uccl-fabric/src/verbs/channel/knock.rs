//! Whether anybody is at an address: a connection over TCP that is begun, without blocking, and given up.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use socket2::{Domain, Socket, Type};

/// A connection that is wanted for its answer only.
pub(super) struct Knock(Socket);

impl Knock {
    pub(super) fn begin(from: IpAddr, to: SocketAddr) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), None)?;
        // Closed without a farewell, so that no port stays taken, which siw may want next.
        socket.set_linger(Some(Duration::ZERO))?;
        socket.bind(&SocketAddr::new(from, 0).into())?;
        match socket.connect(&to.into()) {
            Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) && !is_answer(&e) => Err(e),
            _ => Ok(Self(socket)),
        }
    }

    /// Whether there was an answer, be it that nobody listens. Does not block.
    ///
    /// # Errors
    /// There will be none.
    pub(super) fn is_answered(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.0, PollFlags::OUT)];
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) | Err(Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(e) => return Err(e.into()),
        }
        match self.0.take_error()? {
            Some(e) if !is_answer(&e) => Err(e),
            _ => Ok(true),
        }
    }
}

impl AsFd for Knock {
    /// Writable when there is an answer.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn is_answer(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn is_answered_in_time(knock: &Knock) -> bool {
        (0..200).any(|_| {
            thread::sleep(Duration::from_millis(1));
            knock.is_answered().expect("no error")
        })
    }

    /// A socket that takes one connection, and is silent to the next.
    fn busy() -> (Socket, SocketAddr, Knock) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.bind(&SocketAddr::new(HERE, 0).into()).expect("bound");
        socket.listen(0).expect("listens");
        let address = socket.local_addr().expect("an address").as_socket().expect("an IP's");
        let first = Knock::begin(HERE, address).expect("begun");
        assert!(is_answered_in_time(&first));
        (socket, address, first)
    }

    #[test]
    fn who_listens_and_who_refuses_answers() {
        let listener = TcpListener::bind((HERE, 0)).expect("a listener");
        let address = listener.local_addr().expect("an address");
        assert!(is_answered_in_time(&Knock::begin(HERE, address).expect("begun")));
        drop(listener);
        assert!(is_answered_in_time(&Knock::begin(HERE, address).expect("begun")));
    }

    #[test]
    fn who_is_silent_does_not() {
        let (_socket, address, _first) = busy();
        let knock = Knock::begin(HERE, address).expect("begun");
        assert!(!is_answered_in_time(&knock));
    }
}
