//! Writes of a device to a GPU's memory are flushed before anybody learns of them. The tests run on
//! a fake driver (its first GPUs need a flush, its last does not) and over libfabric, where no
//! provider reaches GPUs here.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
#[path = "support/loopback.rs"]
mod loopback;

use std::{env, time::Duration};

use uccl_libfabric::{Devices, LibfabricRail, LibfabricSettings};
use uccl_p2p::{
    Config, ConnId, Endpoint, Iov, NoInterrupt, Op, Request, Status, Transport,
    device::cuda::{DeviceBuffer, Gpus},
};

use self::{fake_driver::Fake, loopback::on_loopback};

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: usize = 100_000;

struct Scene {
    a: Endpoint,
    b: Endpoint,
    to_b: ConnId,
    to_a: ConnId,
}

fn scene() -> Option<Scene> {
    let settings = LibfabricSettings {
        library: env::var_os("UCCL_LIBFABRIC_SO").map(Into::into),
        provider: Some("tcp;ofi_rxm".into()),
        devices: Devices::Named(vec!["lo".into()]),
        ..LibfabricSettings::default()
    };
    if let Err(why) = LibfabricRail::open_all(&settings) {
        eprintln!("skipped: {why}");
        return None;
    }
    let [a, b] = [(), ()].map(|()| {
        let config = Config {
            transport: Transport::Libfabric,
            libfabric: settings.clone(),
            ..on_loopback()
        };
        Endpoint::new(config).expect("an endpoint")
    });
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    let to_a = b.accept(None, &mut NoInterrupt).expect("accepted").conn;
    Some(Scene { a, b, to_b, to_a })
}

fn finish(ep: &Endpoint, request: &Request<'_>) {
    let transfer = ep.post(request).expect("posted");
    let status = ep.wait(transfer, Some(PATIENCE), &mut NoInterrupt).expect("known");
    assert!(matches!(status, Status::Done(_)), "{status:?}");
}

/// The flushes of GPU memory during a receive into this GPU's memory, two reads into it, and the
/// taking of a notification.
fn flushes(fake: Fake, gpu: u32) -> Option<[i32; 4]> {
    let Scene { a, b, to_b, to_a } = scene()?;
    let context = Gpus::get().device(gpu).expect("a GPU").context().expect("its context");
    let there = DeviceBuffer::new(context, LEN).expect("memory");
    let here = vec![7_u8; LEN];
    // SAFETY: the memory is kept longer than the endpoints.
    let (mr, remote) = unsafe {
        let mr = a.register(here.as_ptr() as usize, LEN).expect("registered");
        (mr, b.register(there.address() as usize, LEN).expect("registered"))
    };
    let ours = [Iov { mr, ptr: here.as_ptr() as usize, len: LEN }];
    let theirs = [Iov { mr: remote, ptr: there.address() as usize, len: LEN }];
    let adverts = [a.advertise(mr, ours[0].ptr, LEN).expect("advertised")];
    let counted = |act: &dyn Fn()| {
        let before = fake.flushes();
        act();
        fake.flushes() - before
    };
    let received = counted(&|| {
        let recv = b.post(&Request::new(to_a, Op::Recv, &theirs, &[])).expect("posted");
        finish(&a, &Request::new(to_b, Op::Send, &ours, &[]));
        let status = b.wait(recv, Some(PATIENCE), &mut NoInterrupt).expect("known");
        assert!(matches!(status, Status::Done(_)), "{status:?}");
    });
    let read = counted(&|| finish(&b, &Request::new(to_a, Op::Read, &theirs, &adverts)));
    let read_at_once = counted(&|| {
        b.run(&Request::new(to_a, Op::Read, &theirs, &adverts), &mut NoInterrupt).expect("read");
    });
    let notified = counted(&|| {
        let sent = a.send_notif(to_b, vec![1], None).expect("posted");
        a.wait(sent, Some(PATIENCE), &mut NoInterrupt).expect("known");
        assert_eq!(b.take_notifs().expect("open").len(), 1);
    });
    drop((a, b));
    Some([received, read, read_at_once, notified])
}

#[test]
fn writes_of_devices_are_shown_to_gpus_that_need_it_before_anybody_is_told() {
    let fake = fake_driver::load();
    let count = Gpus::get().devices().len() as u32;
    let Some(last) = flushes(fake, count - 1) else { return };
    assert_eq!(last, [0; 4], "it needs none");
    let first = flushes(fake, 0).expect("the library is there");
    assert_eq!(first, [1; 4]);
}
