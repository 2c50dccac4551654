"""The thread pool as LLVM text: a few hundred instructions that run an entry function on several threads at once.

In: nothing but the frame layout of `dnnc.backends.runtime.frames`. Out: the text of a module that exports
    ptr  dnnc_pool_state()                                             the pool of this object file, zero at first
    i64  dnnc_pool_run(pool, entry, frame, buffers, dims, nthreads)    calls entry on each thread; Frame.status
    void dnnc_barrier(frame)                                           also reached through Frame[FRAME_BARRIER]
    i64  dnnc_pool_stop(pool)                                          ends and joins the workers; 1 if it is busy
It is text because threads must not pass through Python: a whole parallel call costs a few microseconds, a barrier a
fraction of one.

A run belongs to the one caller that takes the lock; any other runs alone on its own thread. Each worker waits on its
own `go` word, so a run of 2 threads wakes nobody else and a worker can never see the job of a run it has no part in.
Every wait spins for a bounded number of pauses and then sleeps in a futex. It never yields: with other processes on the
machine a yield costs a time slice, milliseconds.

Who changes a word and then reads `asleep`, and who raises `asleep` and then reads the word, both do so sequentially
consistent: one of them sees the other, so no wake-up is lost.

A scheduler likes to wake a thread on the CPU of who wakes it, and may leave both there, where two threads are no faster
than one. So a thread sleeps with its affinity limited to the CPU that it is on, and at the start of a run a worker
whose CPU another thread of the run has claimed moves to a free one. Masks are restored at once: nothing stays pinned.
"""

from __future__ import annotations

from dnnc.backends.runtime.frames import FRAME_BARRIER, FRAME_DIMS, FRAME_NTHREADS, FRAME_POOL, FRAME_STATUS

MAX_THREADS = 256  # the caller among them
# pauses before sleeping, 0.1 to 0.2 ms: what a caller does in Python between two runs. Sleeping costs 10 to 50 us
SPINS = 4096
# elements times operations under which a second thread costs more (a barrier, cold caches) than it saves
SERIAL_BELOW = 16384

# Offsets into the pool in bytes. Words that different threads write lie 128 bytes apart: lines are fetched in pairs.
LOCK, PENDING, CALLER_ASLEEP = 0, 128, 132
ARRIVED, GENERATION, BARRIER_ASLEEP = 256, 384, 512
JOB_ENTRY, JOB_FRAME, JOB_BUFFERS, JOB_DIMS, JOB_NTHREADS = 640, 648, 656, 664, 672
CREATED, STOP = 688, 692
CLAIMED, CPU_WORDS = 768, 16  # one bit per CPU on which a thread of this run is; 1024 CPUs, as in glibc's cpu_set_t
SLOTS, SLOT_BYTES = 896, 128
SLOT_GO, SLOT_ASLEEP, SLOT_POOL, SLOT_TID, SLOT_HANDLE = 0, 4, 8, 16, 24  # within the slot of a worker
POOL_BYTES = SLOTS + SLOT_BYTES * (MAX_THREADS - 1)

FUTEX, FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 202, 128, 129  # Linux on x86-64
SIG_SETMASK = 2
# A worker takes no signal that could go to Python's threads, but those of its own faults: ILL TRAP ABRT BUS FPE SEGV.
BLOCKED_SIGNALS = ~sum(1 << (n - 1) for n in (4, 5, 6, 7, 8, 11))

ENTRY_TYPE = "i64 (ptr, ptr, ptr, i64, i64)"


def _field(name: str, base: str, offset: int) -> str:
    return f"  %{name} = getelementptr i8, ptr %{base}, i64 {offset}\n"


_DECLARATIONS = """\
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_getcpu()
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i64 @syscall(i64, ...)
declare void @llvm.x86.sse2.pause()
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""

_STATE = f"""
@pool = internal global [{POOL_BYTES} x i8] zeroinitializer, align 128

define ptr @dnnc_pool_state() nounwind {{
  ret ptr @pool
}}
"""

_ALONE = f"""
define internal i64 @alone(ptr %pool, ptr %entry, ptr %frame, ptr %buffers, ptr %dims) nounwind {{
  call void @prepare(ptr %pool, ptr %frame, ptr %dims, i64 1)
  %ignored = call {ENTRY_TYPE} %entry(ptr %frame, ptr %buffers, ptr %dims, i64 0, i64 1)
{_field("status.p", "frame", 8 * FRAME_STATUS)}\
  %status = load i64, ptr %status.p
  ret i64 %status
}}

; the slots of a frame that every run sets
define internal void @prepare(ptr %pool, ptr %frame, ptr %dims, i64 %n) nounwind {{
{_field("dims.p", "frame", 8 * FRAME_DIMS)}\
{_field("code.p", "frame", 8 * FRAME_STATUS)}\
{_field("kernel.p", "frame", 8 * FRAME_STATUS + 8)}\
{_field("value.p", "frame", 8 * FRAME_STATUS + 16)}\
{_field("barrier.p", "frame", 8 * FRAME_BARRIER)}\
{_field("pool.p", "frame", 8 * FRAME_POOL)}\
{_field("n.p", "frame", 8 * FRAME_NTHREADS)}\
  store ptr %dims, ptr %dims.p
  store i64 0, ptr %code.p
  store i64 0, ptr %kernel.p
  store i64 0, ptr %value.p
  store ptr @dnnc_barrier, ptr %barrier.p
  store ptr %pool, ptr %pool.p
  store i64 %n, ptr %n.p
  ret void
}}
"""

_SINGLE = """
define void @dnnc_barrier(ptr %frame) nounwind {
  ret void
}

define i64 @dnnc_pool_run(ptr %pool, ptr %entry, ptr %frame, ptr %buffers, ptr %dims, i64 %asked) nounwind {
  %status = call i64 @alone(ptr %pool, ptr %entry, ptr %frame, ptr %buffers, ptr %dims)
  ret i64 %status
}

define i64 @dnnc_pool_stop(ptr %pool) nounwind {
  ret i64 0
}
"""

_WAIT = f"""
; returns once *word != old
define internal void @wait(ptr %word, ptr %asleep, i32 %old) nounwind {{
entry:
  %mask = alloca [{CPU_WORDS} x i64], align 8
  br label %spin
spin:
  %i = phi i32 [ 0, %entry ], [ %i.next, %pause ]
  %seen = load atomic i32, ptr %word acquire, align 4
  %changed = icmp ne i32 %seen, %old
  br i1 %changed, label %done, label %pause
pause:
  call void @llvm.x86.sse2.pause()
  %i.next = add i32 %i, 1
  %more = icmp ult i32 %i.next, {SPINS}
  br i1 %more, label %spin, label %sleep
sleep:
  %stays = call i1 @stay(ptr %mask)
  %up = atomicrmw add ptr %asleep, i32 1 seq_cst, align 4
  br label %check
check:
  %now = load atomic i32, ptr %word seq_cst, align 4
  %differs = icmp ne i32 %now, %old
  br i1 %differs, label %awake, label %futex
futex:
  %rc = call i64 (i64, ...) @syscall(i64 {FUTEX}, ptr %word, i64 {FUTEX_WAIT_PRIVATE}, i32 %old, ptr null, ptr null, \
i64 0)
  br label %check
awake:
  %down = atomicrmw sub ptr %asleep, i32 1 seq_cst, align 4
  br i1 %stays, label %restore, label %done
restore:
  %rc.mask = call i32 @sched_setaffinity(i32 0, i64 {8 * CPU_WORDS}, ptr %mask)
  br label %done
done:
  ret void
}}

; after a sequentially consistent change of *word: wakes those who sleep on it
define internal void @wake(ptr %word, ptr %asleep) nounwind {{
  %n = load atomic i32, ptr %asleep seq_cst, align 4
  %any = icmp ne i32 %n, 0
  br i1 %any, label %futex, label %done
futex:
  %rc = call i64 (i64, ...) @syscall(i64 {FUTEX}, ptr %word, i64 {FUTEX_WAKE_PRIVATE}, i64 2147483647, ptr null, \
ptr null, i64 0)
  br label %done
done:
  ret void
}}
"""

_BARRIER = f"""
; the frame is read before arriving: a thread that is let go may find it freed
define void @dnnc_barrier(ptr %frame) nounwind {{
{_field("n.p", "frame", 8 * FRAME_NTHREADS)}\
  %n.wide = load i64, ptr %n.p
  %single = icmp sle i64 %n.wide, 1
  br i1 %single, label %done, label %arrive
arrive:
{_field("pool.p", "frame", 8 * FRAME_POOL)}\
  %pool = load ptr, ptr %pool.p
{_field("arrived", "pool", ARRIVED)}\
{_field("generation", "pool", GENERATION)}\
{_field("asleep", "pool", BARRIER_ASLEEP)}\
  %n = trunc i64 %n.wide to i32
  %old = load atomic i32, ptr %generation acquire, align 4
  %before = atomicrmw add ptr %arrived, i32 1 acq_rel, align 4
  %count = add i32 %before, 1
  %last = icmp eq i32 %count, %n
  br i1 %last, label %release, label %hold
release:
  store atomic i32 0, ptr %arrived monotonic, align 4
  %bumped = atomicrmw add ptr %generation, i32 1 seq_cst, align 4
  call void @wake(ptr %generation, ptr %asleep)
  br label %done
hold:
  call void @wait(ptr %generation, ptr %asleep, i32 %old)
  br label %done
done:
  ret void
}}
"""

_PLACEMENT = f"""
; the word of a set of CPUs, and the bit in it (through %bit), that stand for the CPU of the calling thread
define internal ptr @own(ptr %set, ptr %bit) nounwind {{
  %cpu = call i32 @sched_getcpu()
  %wide = zext i32 %cpu to i64
  %word = lshr i64 %wide, 6
  %within = and i64 %word, {CPU_WORDS - 1}
  %place = and i64 %wide, 63
  %one = shl i64 1, %place
  store i64 %one, ptr %bit
  %p = getelementptr i64, ptr %set, i64 %within
  ret ptr %p
}}

; claims the CPU of the calling thread; false when another thread of this run has it
define internal i1 @claim(ptr %claimed) nounwind {{
  %bit.p = alloca i64, align 8
  %p = call ptr @own(ptr %claimed, ptr %bit.p)
  %bit = load i64, ptr %bit.p
  %old = atomicrmw or ptr %p, i64 %bit monotonic, align 8
  %was = and i64 %old, %bit
  %free = icmp eq i64 %was, 0
  ret i1 %free
}}

; before sleeping: a wake-up must not put the calling thread on the CPU of who wakes it. \
%mask gets what it may use otherwise; false when that fails
define internal i1 @stay(ptr %mask) nounwind {{
  %here = alloca [{CPU_WORDS} x i64], align 8
  %bit.p = alloca i64, align 8
  %rc = call i32 @sched_getaffinity(i32 0, i64 {8 * CPU_WORDS}, ptr %mask)
  %ok = icmp eq i32 %rc, 0
  br i1 %ok, label %limit, label %no
limit:
  call void @llvm.memset.p0.i64(ptr %here, i8 0, i64 {8 * CPU_WORDS}, i1 false)
  %p = call ptr @own(ptr %here, ptr %bit.p)
  %bit = load i64, ptr %bit.p
  store i64 %bit, ptr %p
  %rc.set = call i32 @sched_setaffinity(i32 0, i64 {8 * CPU_WORDS}, ptr %here)
  %set = icmp eq i32 %rc.set, 0
  ret i1 %set
no:
  ret i1 false
}}

; at the start of a run: moves the calling thread to a CPU that nobody claims when its own is taken
define internal void @settle(ptr %claimed) nounwind {{
entry:
  %mask = alloca [{CPU_WORDS} x i64], align 8
  %free = alloca [{CPU_WORDS} x i64], align 8
  %mine = call i1 @claim(ptr %claimed)
  br i1 %mine, label %done, label %look
look:
  call void @llvm.memset.p0.i64(ptr %mask, i8 0, i64 {8 * CPU_WORDS}, i1 false)
  %rc = call i32 @sched_getaffinity(i32 0, i64 {8 * CPU_WORDS}, ptr %mask)
  br label %next
next:
  %k = phi i64 [ 0, %look ], [ %k.next, %next ]
  %any = phi i64 [ 0, %look ], [ %any.next, %next ]
  %mask.k = getelementptr i64, ptr %mask, i64 %k
  %claimed.k = getelementptr i64, ptr %claimed, i64 %k
  %free.k = getelementptr i64, ptr %free, i64 %k
  %may = load i64, ptr %mask.k
  %taken = load atomic i64, ptr %claimed.k monotonic, align 8
  %open = xor i64 %taken, -1
  %left = and i64 %may, %open
  store i64 %left, ptr %free.k
  %any.next = or i64 %any, %left
  %k.next = add i64 %k, 1
  %more = icmp ult i64 %k.next, {CPU_WORDS}
  br i1 %more, label %next, label %choose
choose:
  %none = icmp eq i64 %any.next, 0
  br i1 %none, label %done, label %move
move:
  %rc.move = call i32 @sched_setaffinity(i32 0, i64 {8 * CPU_WORDS}, ptr %free)
  %rc.back = call i32 @sched_setaffinity(i32 0, i64 {8 * CPU_WORDS}, ptr %mask)
  %ignored = call i1 @claim(ptr %claimed)
  br label %done
done:
  ret void
}}
"""

_WORKER = f"""
define internal ptr @worker(ptr %slot) nounwind {{
entry:
  %mask = alloca [16 x i64], align 8
  call void @llvm.memset.p0.i64(ptr %mask, i8 -1, i64 128, i1 false)
  store i64 {BLOCKED_SIGNALS}, ptr %mask
  %rc = call i32 @pthread_sigmask(i32 {SIG_SETMASK}, ptr %mask, ptr null)
{_field("asleep", "slot", SLOT_ASLEEP)}\
{_field("slot.pool", "slot", SLOT_POOL)}\
{_field("slot.tid", "slot", SLOT_TID)}\
  %pool = load ptr, ptr %slot.pool
  %tid = load i64, ptr %slot.tid
{_field("stop", "pool", STOP)}\
{_field("pending", "pool", PENDING)}\
{_field("caller.asleep", "pool", CALLER_ASLEEP)}\
{_field("claimed", "pool", CLAIMED)}\
{_field("job.entry", "pool", JOB_ENTRY)}\
{_field("job.frame", "pool", JOB_FRAME)}\
{_field("job.buffers", "pool", JOB_BUFFERS)}\
{_field("job.dims", "pool", JOB_DIMS)}\
{_field("job.n", "pool", JOB_NTHREADS)}\
  br label %next
next:
  %old = phi i32 [ 0, %entry ], [ %new, %work ], [ %new, %last ]
  call void @wait(ptr %slot, ptr %asleep, i32 %old)
  %new = load atomic i32, ptr %slot acquire, align 4
  %stopping = load atomic i32, ptr %stop acquire, align 4
  %ends = icmp ne i32 %stopping, 0
  br i1 %ends, label %exit, label %work
work:
  call void @settle(ptr %claimed)
  %f = load ptr, ptr %job.entry
  %frame = load ptr, ptr %job.frame
  %buffers = load ptr, ptr %job.buffers
  %dims = load ptr, ptr %job.dims
  %n = load i64, ptr %job.n
  %ignored = call {ENTRY_TYPE} %f(ptr %frame, ptr %buffers, ptr %dims, i64 %tid, i64 %n)
  %left = atomicrmw sub ptr %pending, i32 1 seq_cst, align 4
  %was.last = icmp eq i32 %left, 1
  br i1 %was.last, label %last, label %next
last:
  call void @wake(ptr %pending, ptr %caller.asleep)
  br label %next
exit:
  ret ptr null
}}
"""

_START = f"""
; with the lock held: makes workers until there are %want; returns how many there are, \
fewer when the system gives no more
define internal i32 @grow(ptr %pool, i32 %want) nounwind {{
entry:
{_field("created.p", "pool", CREATED)}\
  %first = load i32, ptr %created.p
  br label %next
next:
  %k = phi i32 [ %first, %entry ], [ %k.next, %made ]
  %enough = icmp sge i32 %k, %want
  br i1 %enough, label %done, label %make
make:
  %slot = call ptr @slot(ptr %pool, i32 %k)
{_field("slot.pool", "slot", SLOT_POOL)}\
{_field("slot.tid", "slot", SLOT_TID)}\
{_field("slot.handle", "slot", SLOT_HANDLE)}\
  %k.next = add i32 %k, 1
  %tid = sext i32 %k.next to i64
  store ptr %pool, ptr %slot.pool
  store i64 %tid, ptr %slot.tid
  %rc = call i32 @pthread_create(ptr %slot.handle, ptr null, ptr @worker, ptr %slot)
  %ok = icmp eq i32 %rc, 0
  br i1 %ok, label %made, label %done
made:
  store i32 %k.next, ptr %created.p
  br label %next
done:
  ret i32 %k
}}

define internal ptr @slot(ptr %pool, i32 %k) nounwind {{
  %wide = sext i32 %k to i64
  %bytes = mul i64 %wide, {SLOT_BYTES}
  %offset = add i64 %bytes, {SLOTS}
  %slot = getelementptr i8, ptr %pool, i64 %offset
  ret ptr %slot
}}

; sends the first %n workers off
define internal void @dispatch(ptr %pool, i32 %n) nounwind {{
entry:
  br label %next
next:
  %k = phi i32 [ 0, %entry ], [ %k.next, %go ]
  %more = icmp slt i32 %k, %n
  br i1 %more, label %go, label %done
go:
  %slot = call ptr @slot(ptr %pool, i32 %k)
{_field("asleep", "slot", SLOT_ASLEEP)}\
  %old = atomicrmw add ptr %slot, i32 1 seq_cst, align 4
  call void @wake(ptr %slot, ptr %asleep)
  %k.next = add i32 %k, 1
  br label %next
done:
  ret void
}}

define internal i1 @take(ptr %lock) nounwind {{
  %seen = load atomic i32, ptr %lock monotonic, align 4
  %busy = icmp ne i32 %seen, 0
  br i1 %busy, label %no, label %try
try:
  %old = atomicrmw xchg ptr %lock, i32 1 acquire, align 4
  %free = icmp eq i32 %old, 0
  ret i1 %free
no:
  ret i1 false
}}
"""

_RUN = f"""
define i64 @dnnc_pool_run(ptr %pool, ptr %entry, ptr %frame, ptr %buffers, ptr %dims, i64 %asked) nounwind {{
start:
  %many = icmp sgt i64 %asked, 1
  br i1 %many, label %lock, label %single
lock:
  %taken = call i1 @take(ptr %pool)
  br i1 %taken, label %size, label %single
single:
  %alone = call i64 @alone(ptr %pool, ptr %entry, ptr %frame, ptr %buffers, ptr %dims)
  ret i64 %alone
size:
  %fits = icmp slt i64 %asked, {MAX_THREADS}
  %capped = select i1 %fits, i64 %asked, i64 {MAX_THREADS}
  %wanted.wide = sub i64 %capped, 1
  %wanted = trunc i64 %wanted.wide to i32
  %have = call i32 @grow(ptr %pool, i32 %wanted)
  %fewer = icmp slt i32 %have, %wanted
  %workers = select i1 %fewer, i32 %have, i32 %wanted
  %none = icmp eq i32 %workers, 0
  br i1 %none, label %unlock, label %send
unlock:
  store atomic i32 0, ptr %pool release, align 4
  br label %single
send:
  %n.less = sext i32 %workers to i64
  %n = add i64 %n.less, 1
  call void @prepare(ptr %pool, ptr %frame, ptr %dims, i64 %n)
{_field("job.entry", "pool", JOB_ENTRY)}\
{_field("job.frame", "pool", JOB_FRAME)}\
{_field("job.buffers", "pool", JOB_BUFFERS)}\
{_field("job.dims", "pool", JOB_DIMS)}\
{_field("job.n", "pool", JOB_NTHREADS)}\
{_field("pending", "pool", PENDING)}\
{_field("asleep", "pool", CALLER_ASLEEP)}\
{_field("claimed", "pool", CLAIMED)}\
  store ptr %entry, ptr %job.entry
  store ptr %frame, ptr %job.frame
  store ptr %buffers, ptr %job.buffers
  store ptr %dims, ptr %job.dims
  store i64 %n, ptr %job.n
  call void @llvm.memset.p0.i64(ptr %claimed, i8 0, i64 {8 * CPU_WORDS}, i1 false)
  %ignored.claim = call i1 @claim(ptr %claimed)
  store atomic i32 %workers, ptr %pending seq_cst, align 4
  call void @dispatch(ptr %pool, i32 %workers)
  %ignored = call {ENTRY_TYPE} %entry(ptr %frame, ptr %buffers, ptr %dims, i64 0, i64 %n)
  br label %join
join:
  %left = load atomic i32, ptr %pending acquire, align 4
  %over = icmp eq i32 %left, 0
  br i1 %over, label %finish, label %linger
linger:
  call void @wait(ptr %pending, ptr %asleep, i32 %left)
  br label %join
finish:
{_field("status.p", "frame", 8 * FRAME_STATUS)}\
  %status = load i64, ptr %status.p
  store atomic i32 0, ptr %pool release, align 4
  ret i64 %status
}}
"""

_STOP = f"""
define i64 @dnnc_pool_stop(ptr %pool) nounwind {{
entry:
  %taken = call i1 @take(ptr %pool)
  br i1 %taken, label %end, label %busy
busy:
  ret i64 1
end:
{_field("stop", "pool", STOP)}\
{_field("created.p", "pool", CREATED)}\
  store atomic i32 1, ptr %stop seq_cst, align 4
  %n = load i32, ptr %created.p
  call void @dispatch(ptr %pool, i32 %n)
  br label %next
next:
  %k = phi i32 [ 0, %end ], [ %k.next, %join ]
  %more = icmp slt i32 %k, %n
  br i1 %more, label %join, label %clear
join:
  %slot = call ptr @slot(ptr %pool, i32 %k)
{_field("slot.handle", "slot", SLOT_HANDLE)}\
  %handle = load i64, ptr %slot.handle
  %rc = call i32 @pthread_join(i64 %handle, ptr null)
  %k.next = add i32 %k, 1
  br label %next
clear:
{_field("rest", "pool", 128)}\
  call void @llvm.memset.p0.i64(ptr %rest, i8 0, i64 {POOL_BYTES - 128}, i1 false)
  store atomic i32 0, ptr %pool release, align 4
  ret i64 0
}}
"""


# A call from Python: what `call` reads, int64 each. The last ones are addresses of CPython's functions, in this order.
CALL_OUT = 0  # address at which the addresses of the arguments are written
CALL_ENTRY, CALL_FRAME, CALL_BUFFERS, CALL_DIMS, CALL_NTHREADS = 1, 2, 3, 4, 5  # of `dnnc_pool_run`
CALL_API = 6
PYTHON_API = (
    "PyObject_GetBuffer", "PyBuffer_Release", "PySequence_Size", "PySequence_GetItem", "Py_DecRef",
    "PyEval_SaveThread", "PyEval_RestoreThread",
)  # fmt: skip
CALL_WORDS = CALL_API + len(PYTHON_API)

_CALL = f"""
; Writes the addresses of the buffers of a sequence from %out on; returns the address behind the last, null on an error.
define internal ptr @addresses(ptr %call, ptr %arrays, ptr %out) nounwind {{
entry:
  %view = alloca [128 x i8], align 16
  %get.p = getelementptr i64, ptr %call, i64 {CALL_API}
  %get = load ptr, ptr %get.p
  %release.p = getelementptr i64, ptr %call, i64 {CALL_API + 1}
  %release = load ptr, ptr %release.p
  %size.p = getelementptr i64, ptr %call, i64 {CALL_API + 2}
  %size = load ptr, ptr %size.p
  %item.p = getelementptr i64, ptr %call, i64 {CALL_API + 3}
  %item = load ptr, ptr %item.p
  %drop.p = getelementptr i64, ptr %call, i64 {CALL_API + 4}
  %drop = load ptr, ptr %drop.p
  %n = call i64 %size(ptr %arrays)
  br label %next
next:
  %k = phi i64 [ 0, %entry ], [ %k1, %written ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %array, label %done
array:
  %object = call ptr %item(ptr %arrays, i64 %k)
  %rc = call i32 %get(ptr %object, ptr %view, i32 0)
  call void %drop(ptr %object)
  %failed = icmp ne i32 %rc, 0
  br i1 %failed, label %error, label %written
written:
  %address = load i64, ptr %view
  %at = getelementptr i64, ptr %out, i64 %k
  store i64 %address, ptr %at
  call void %release(ptr %view)
  %k1 = add i64 %k, 1
  br label %next
done:
  %end = getelementptr i64, ptr %out, i64 %n
  ret ptr %end
error:
  ret ptr null
}}

; Runs a program on arrays that Python holds; -1 with an exception set where one of them gives no buffer.
define i64 @dnnc_pool_call(ptr %pool, ptr %call, ptr %arrays, ptr %results) nounwind {{
entry:
  %out.p = getelementptr i64, ptr %call, i64 {CALL_OUT}
  %out = load ptr, ptr %out.p
  %behind = call ptr @addresses(ptr %call, ptr %arrays, ptr %out)
  %bad = icmp eq ptr %behind, null
  br i1 %bad, label %error, label %rest
rest:
  %last = call ptr @addresses(ptr %call, ptr %results, ptr %behind)
  %worse = icmp eq ptr %last, null
  br i1 %worse, label %error, label %run
run:
  %entry.p = getelementptr i64, ptr %call, i64 {CALL_ENTRY}
  %entry.f = load ptr, ptr %entry.p
  %frame.p = getelementptr i64, ptr %call, i64 {CALL_FRAME}
  %frame = load ptr, ptr %frame.p
  %buffers.p = getelementptr i64, ptr %call, i64 {CALL_BUFFERS}
  %buffers = load ptr, ptr %buffers.p
  %dims.p = getelementptr i64, ptr %call, i64 {CALL_DIMS}
  %dims = load ptr, ptr %dims.p
  %n.p = getelementptr i64, ptr %call, i64 {CALL_NTHREADS}
  %n = load i64, ptr %n.p
  %save.p = getelementptr i64, ptr %call, i64 {CALL_API + 5}
  %save = load ptr, ptr %save.p
  %restore.p = getelementptr i64, ptr %call, i64 {CALL_API + 6}
  %restore = load ptr, ptr %restore.p
  %state = call ptr %save()
  %status = call i64 @dnnc_pool_run(ptr %pool, ptr %entry.f, ptr %frame, ptr %buffers, ptr %dims, i64 %n)
  call void %restore(ptr %state)
  ret i64 %status
error:
  ret i64 -1
}}
"""


def pool_text(threads: bool = True) -> str:
    """The pool's LLVM text. `threads=False`: the same functions on one thread, for other systems than Linux x86-64."""
    if not threads:
        return _STATE + _ALONE + _SINGLE + _CALL
    return _DECLARATIONS + _STATE + _ALONE + _WAIT + _BARRIER + _PLACEMENT + _WORKER + _START + _RUN + _STOP + _CALL
