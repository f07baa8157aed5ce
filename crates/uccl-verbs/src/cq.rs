//! A completion queue, with the completion channel that its events come through.

use std::{
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
    sync::Arc,
};

use uccl_fabric::rail::RailError;

use super::{
    context::{Context, complain, set_nonblocking},
    ffi::{
        abi::{self, PollCq, ReqNotifyCq, Wc},
        check, errno,
    },
};

/// A completion queue. Only one thread at a time polls it.
pub(super) struct Cq {
    raw: NonNull<abi::Cq>,
    poll: PollCq,
    request_notify: ReqNotifyCq,
    events: Events,
}

// SAFETY: verbs may be called from any thread; the library does its own locking.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes one with room for this many completions.
    pub(super) fn new(context: &Arc<Context>, room: i32) -> Result<Arc<Self>, RailError> {
        let events = Events::new(context)?;
        let channel = events.raw.as_ptr();
        let (user, vector) = (ptr::null_mut(), context.next_vector());
        // SAFETY: context and channel live, and the device has the vector.
        let raw =
            unsafe { (context.verbs().create_cq)(context.raw(), room, user, channel, vector) };
        let raw = NonNull::new(raw).ok_or_else(|| context.error("ibv_create_cq", errno()))?;
        // SAFETY: the context lives, and was filled in by the device's driver when it was opened.
        let ops = unsafe { &(*context.raw()).ops };
        let (Some(poll), Some(request_notify)) = (ops.poll_cq, ops.req_notify_cq) else {
            // SAFETY: just made, and used by nothing.
            complain("ibv_destroy_cq", unsafe { (context.verbs().destroy_cq)(raw.as_ptr()) });
            return Err(context.error("ibv_poll_cq", libc::EOPNOTSUPP));
        };
        Ok(Arc::new(Self { raw, poll, request_notify, events }))
    }

    pub(super) fn raw(&self) -> *mut abi::Cq {
        self.raw.as_ptr()
    }

    fn context(&self) -> &Context {
        &self.events.context
    }

    /// Takes as many completions as have come and fit. Returns how many.
    #[inline]
    pub(super) fn poll(&self, wcs: &mut [Wc]) -> Result<usize, RailError> {
        let most = i32::try_from(wcs.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue lives, and there is room for as many completions.
        let count = unsafe { (self.poll)(self.raw(), most, wcs.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) => Ok(count.min(wcs.len())),
            Err(_) => {
                Err(RailError::Lost(format!("{}: ibv_poll_cq says {count}", self.context().name())))
            }
        }
    }

    /// Makes the next completion, once, raise an event on [`Self::fd`].
    pub(super) fn request_notify(&self) -> Result<(), RailError> {
        // SAFETY: the queue lives.
        let returned = unsafe { (self.request_notify)(self.raw(), 0) };
        check(returned).map_err(|errno| self.context().error("ibv_req_notify_cq", errno))
    }

    /// Takes the event that [`Self::request_notify`] asked for, if it has come.
    pub(super) fn take_event(&self) -> bool {
        let (mut cq, mut user) = (ptr::null_mut(), ptr::null_mut());
        let get = self.context().verbs().get_cq_event;
        // SAFETY: the channel lives, both pointers point to live variables, and the descriptor does
        // not block.
        let taken = unsafe { get(self.events.raw.as_ptr(), &raw mut cq, &raw mut user) } == 0;
        if taken {
            // SAFETY: the queue lives, and is the only one of its channel: the event was its own.
            unsafe { (self.context().verbs().ack_cq_events)(self.raw(), 1) };
        }
        taken
    }

    /// The descriptor to watch for completions after [`Self::request_notify`].
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it, so none is left; all its events were acknowledged when
        // taken.
        let returned = unsafe { (self.context().verbs().destroy_cq)(self.raw()) };
        complain("ibv_destroy_cq", returned);
    }
}

/// A completion channel. It is a field of its queue, so it is destroyed after the queue.
struct Events {
    raw: NonNull<abi::CompChannel>,
    context: Arc<Context>,
}

impl Events {
    fn new(context: &Arc<Context>) -> Result<Self, RailError> {
        // SAFETY: the context lives.
        let raw = unsafe { (context.verbs().create_comp_channel)(context.raw()) };
        let raw =
            NonNull::new(raw).ok_or_else(|| context.error("ibv_create_comp_channel", errno()))?;
        let events = Self { raw, context: Arc::clone(context) };
        set_nonblocking(events.fd())
            .map_err(|errno| RailError::os("fcntl on completion events", errno))?;
        Ok(events)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives, and its descriptor is open as long as it does.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: its queue is destroyed already, or was never made.
        let returned = unsafe { (self.context.verbs().destroy_comp_channel)(self.raw.as_ptr()) };
        complain("ibv_destroy_comp_channel", returned);
    }
}
