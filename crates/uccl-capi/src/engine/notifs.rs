//! Notifications, of all engines of the process.

use std::{
    collections::VecDeque,
    ffi::{c_char, c_int, c_void},
    sync::Once,
};

use parking_lot::Mutex;
use uccl_wire::named::NamedMessage;

use super::{ENGINES, NotifyMsg, NotifyMsgV, UcclConn, Vector, code, text::Notifs};
use crate::{
    args,
    failure::{Answer, Failure, run},
};

/// The most notifications that are kept because [`get_notifs`] could not return them.
const MOST_KEPT: usize = 1024;

/// Payloads that no call could return yet, most of them too long for a [`NotifyMsg`], in the order
/// in which they came.
static KEPT: Mutex<VecDeque<Vec<u8>>> = Mutex::new(VecDeque::new());

/// The payloads that have arrived since the last look.
fn arrived() -> Vec<Vec<u8>> {
    // A forked child gets no notifications of its parent's engines.
    let notifs = ENGINES.all().into_iter().filter_map(|engine| engine.core.take_notifs().ok());
    notifs.flatten().map(|notif| notif.payload).collect()
}

/// Keeps a payload that does not fit a [`NotifyMsg`], for the calls that take any length. Prints a
/// notice when it drops the first one.
fn keep_for_others(payload: Vec<u8>) {
    static TOLD: Once = Once::new();
    let mut kept = KEPT.lock();
    if kept.len() >= MOST_KEPT {
        kept.pop_front();
        TOLD.call_once(|| {
            eprintln!(
                "uccl: dropped a notification that does not fit notify_msg_t, of more than {MOST_KEPT} that wait: \
                 uccl_engine_get_notifs_v takes those of any length"
            );
        });
    }
    kept.push_back(payload);
}

/// `uccl_engine_get_notifs`
#[unsafe(export_name = "_Z22uccl_engine_get_notifsv")]
pub extern "C" fn get_notifs() -> Vector<NotifyMsg> {
    let all = run(|| {
        let mut messages = Vec::new();
        for payload in arrived() {
            let NamedMessage { name, message } = NamedMessage::decode(&payload);
            match NotifyMsg::new(name, message) {
                Some(message) => messages.push(message),
                None => keep_for_others(payload),
            }
        }
        Vector::copied(&messages)
    });
    all.unwrap_or(Vector::EMPTY)
}

/// `uccl_engine_send_notif`
#[unsafe(export_name = "_Z22uccl_engine_send_notifP9uccl_connP10notify_msg")]
pub unsafe extern "C" fn send_notif(conn: *mut UcclConn, notify_msg: *mut NotifyMsg) -> c_int {
    code(|| {
        // SAFETY: a message.
        let both = unsafe { args::one(notify_msg, "notify_msg") }?;
        send(conn, both.name(), both.msg())
    })
}

/// `uccl_engine_get_notifs_v`
#[unsafe(export_name = "_Z24uccl_engine_get_notifs_vv")]
pub extern "C" fn get_notifs_v() -> Vector<NotifyMsgV> {
    let all = run(|| {
        let mut payloads = std::mem::take(&mut *KEPT.lock());
        payloads.extend(arrived());
        let mut all = None;
        let made = Notifs::with_room(payloads.len()).and_then(|room| {
            let all = all.insert(room);
            while let Some(payload) = payloads.front() {
                let NamedMessage { name, message } = NamedMessage::decode(payload);
                all.push(name, message)?;
                payloads.pop_front();
            }
            Ok(())
        });
        // The next call returns the notifications for which there is no memory now.
        KEPT.lock().extend(payloads);
        match all {
            Some(all) => Ok(all.finish()),
            None => made.map(|()| Vector::EMPTY),
        }
    });
    all.unwrap_or(Vector::EMPTY)
}

/// `uccl_engine_send_notif_v`
#[unsafe(export_name = "_Z24uccl_engine_send_notif_vP9uccl_connPK12notify_msg_v")]
pub unsafe extern "C" fn send_notif_v(conn: *mut UcclConn, notify_msg: *const NotifyMsgV) -> c_int {
    code(|| {
        // SAFETY: a message.
        let (name, msg) = unsafe { NotifyMsgV::parts(notify_msg) }?;
        send(conn, name, msg)
    })
}

/// Takes a name and a message, each with its length.
pub type Take =
    Option<unsafe extern "C" fn(*mut c_void, *const c_char, usize, *const c_char, usize)>;

/// `uccl_engine_take_notifs`
#[unsafe(export_name = "_Z23uccl_engine_take_notifsPFvPvPKcmS1_mES_")]
pub unsafe extern "C" fn take_notifs(take: Take, context: *mut c_void) -> c_int {
    code(|| {
        let take = take.ok_or_else(|| Failure::invalid("take is NULL"))?;
        let kept = std::mem::take(&mut *KEPT.lock());
        for payload in kept.into_iter().chain(arrived()) {
            let NamedMessage { name, message } = NamedMessage::decode(&payload);
            let (name_ptr, message_ptr) = (name.as_ptr().cast(), message.as_ptr().cast());
            // SAFETY: the caller's function, with its own context.
            unsafe { take(context, name_ptr, name.len(), message_ptr, message.len()) };
        }
        Ok(())
    })
}

/// `uccl_engine_send_named`
#[unsafe(export_name = "_Z22uccl_engine_send_namedP9uccl_connPKcmS2_m")]
pub unsafe extern "C" fn send_named(
    conn: *mut UcclConn,
    name: *const c_char,
    name_len: usize,
    msg: *const c_char,
    msg_len: usize,
) -> c_int {
    code(|| {
        // SAFETY: as many bytes.
        let (name, msg) = unsafe {
            (args::many(name.cast(), name_len, "name")?, args::many(msg.cast(), msg_len, "msg")?)
        };
        send(conn, name, msg)
    })
}

fn send(conn: *mut UcclConn, name: &[u8], message: &[u8]) -> Answer {
    let too_long = || Failure::invalid("a name or a message has 4 GiB or more");
    let payload = NamedMessage { name, message }.encode().ok_or_else(too_long)?;
    let conn = super::conn(conn)?;
    conn.core.send_notif(conn.id, &payload, None)?;
    Ok(())
}
