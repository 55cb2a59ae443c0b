#include "bindings/ring.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "bindings/gil.hpp"
#include "shm/ring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

using namespace shm;

// Bytes copied with the GIL held at most; letting it go costs about as much as copying these.
constexpr size_t kShort = size_t{32} << 10;

Nanoseconds nanoseconds(double seconds) {
  return Nanoseconds(static_cast<int64_t>(std::clamp(seconds, 0.0, 1e6) * 1e9));
}

// A writable buffer of Python's, kept open: an mmap cannot be closed meanwhile.
class Memory {
 public:
  Memory(nb::handle object, const Layout& layout) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_WRITABLE) != 0) throw nb::python_error();
    if (layout.n_reader == 0 || layout.n_reader > 65535 || layout.max_chunks == 0 ||
        layout.max_chunks > 1U << 24 ||
        layout.max_chunk_bytes == 0 || layout.max_chunk_bytes > size_t{1} << 40 ||
        reinterpret_cast<uintptr_t>(buffer_.buf) % Layout::kLine != 0 ||
        layout.total_bytes() > static_cast<size_t>(buffer_.len)) {
      PyBuffer_Release(&buffer_);
      throw nb::value_error("the memory does not hold such a ring");
    }
  }
  ~Memory() { PyBuffer_Release(&buffer_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(buffer_.buf); }

 private:
  Py_buffer buffer_{};
};

// Refuses a second thread while the first is inside.
class Turn {
 public:
  explicit Turn(std::atomic<bool>& taken) : taken_(taken) {
    if (taken_.exchange(true, std::memory_order_acquire)) {
      PyErr_SetString(nb::module_::import_("kvindex.wire.errors").attr("InUseError").ptr(),
                      "this end of the queue is in use by another thread: one at a time");
      throw nb::python_error();
    }
  }
  ~Turn() { taken_.store(false, std::memory_order_release); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& taken_;
};

// Let a wait of another thread return, and give it a second to leave. At the end of the
// interpreter a thread that is inside could not take the GIL back, and would end the process.
template <class Party>
void interrupt(Party& party, const std::atomic<bool>& taken) {
  const GilReleased free;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  party.waiter.interrupt();
  while (taken.load() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    party.waiter.interrupt();
  }
}

// What a message is made of: one buffer, or a list or tuple of them, held open.
class Parts {
 public:
  explicit Parts(nb::handle data) {
    if (PyList_Check(data.ptr()) || PyTuple_Check(data.ptr())) {
      PyObject* const items = data.ptr();
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
      buffers_.reserve(static_cast<size_t>(count));
      for (Py_ssize_t i = 0; i < count; ++i) open(PySequence_Fast_GET_ITEM(items, i));
    } else if (PyBytes_Check(data.ptr())) {  // the usual one, without a buffer's ceremony
      bytes_ = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(data.ptr()));
      size_ = static_cast<size_t>(PyBytes_GET_SIZE(data.ptr()));
    } else {
      open(data.ptr());
    }
  }
  ~Parts() {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  size_t size() const { return size_; }
  void copy(uint8_t* to) const {
    if (bytes_ != nullptr) std::memcpy(to, bytes_, size_);
    for (const Py_buffer& buffer : buffers_) {
      std::memcpy(to, buffer.buf, static_cast<size_t>(buffer.len));
      to += buffer.len;
    }
  }

 private:
  void open(PyObject* object) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) != 0) {
      for (Py_buffer& opened : buffers_) PyBuffer_Release(&opened);
      buffers_.clear();
      throw nb::python_error();
    }
    buffers_.push_back(buffer);
    size_ += static_cast<size_t>(buffer.len);
  }

  const uint8_t* bytes_ = nullptr;
  std::vector<Py_buffer> buffers_;
  size_t size_ = 0;
};

nb::dict counters(const WaitCounters& counted) {
  nb::dict all;
  all["spins"] = uint64_t{counted.spins};
  all["sleeps"] = uint64_t{counted.sleeps};
  all["wakes"] = uint64_t{counted.wakes};
  return all;
}

class RingWriter {
 public:
  RingWriter(nb::handle memory, uint32_t n_reader, uint32_t max_chunks, uint64_t max_chunk_bytes)
      : layout_{n_reader, max_chunks, max_chunk_bytes},
        memory_(memory, layout_),
        writer_(memory_.data(), layout_) {}

  bool write(uint32_t kind, nb::handle data, double spin, double sleep) {
    Turn turn(taken_);
    const Parts parts(data);
    if (parts.size() > layout_.max_chunk_bytes) throw nb::value_error("longer than a chunk");
    if (writer_.ready() && parts.size() <= kShort) {
      writer_.waiter.served_at_once();
      put(kind, parts);
      return true;
    }
    const GilReleased free;
    if (!writer_.wait(nanoseconds(spin), nanoseconds(sleep))) return false;
    put(kind, parts);
    return true;
  }

  bool wait(double spin, double sleep) {
    Turn turn(taken_);
    if (writer_.ready()) return true;
    const GilReleased free;
    return writer_.wait(nanoseconds(spin), nanoseconds(sleep));
  }

  void publish(uint32_t kind, uint64_t length) {
    Turn turn(taken_);
    if (!writer_.ready()) throw nb::value_error("the chunk is not free");
    if (length > layout_.max_chunk_bytes) throw nb::value_error("longer than a chunk");
    writer_.publish(kind, length);
  }

  bool wait_attached(double sleep) {
    Turn turn(taken_);
    const GilReleased free;
    return writer_.wait_attached(nanoseconds(sleep));
  }

  uint32_t index() const { return writer_.index(); }
  uint64_t seq() const { return writer_.seq(); }
  uint32_t admit() {
    Turn turn(taken_);
    return writer_.admit();
  }
  std::vector<uint32_t> awaited() const { return writer_.awaited(); }
  bool remove(uint32_t reader, bool evict) {
    check(reader);
    return writer_.remove(reader, evict ? SlotState::kEvicted : SlotState::kFree);
  }
  uint32_t slot_state(uint32_t reader) const {
    check(reader);
    return writer_.ring().slot_state(reader).load();
  }
  void reserve(uint32_t reader) {
    check(reader);
    writer_.ring().slot_state(reader).store(static_cast<uint32_t>(SlotState::kReserved));
  }
  uint32_t state() const { return writer_.ring().state().load(); }
  void set_state(uint32_t state) { writer_.set_state(state); }
  void interrupt() { kvindex::interrupt(writer_, taken_); }
  nb::dict statistics() const { return counters(writer_.waiter.counters); }

 private:
  void put(uint32_t kind, const Parts& parts) {
    parts.copy(writer_.chunk());
    writer_.publish(kind, parts.size());
  }
  void check(uint32_t reader) const {
    if (reader >= layout_.n_reader) throw nb::index_error("no such reader");
  }

  Layout layout_;
  Memory memory_;
  Writer writer_;
  std::atomic<bool> taken_{false};
};

class RingReader {
 public:
  RingReader(nb::handle memory, uint32_t n_reader, uint32_t max_chunks, uint64_t max_chunk_bytes,
             uint32_t slot)
      : layout_{n_reader, max_chunks, max_chunk_bytes},
        memory_(memory, layout_),
        reader_(memory_.data(), layout_, slot) {
    if (slot >= n_reader) throw nb::index_error("no such reader");
  }

  bool attach() { return reader_.attach(); }
  void leave() { reader_.leave(); }

  // None if no message came in this wait. Else its kind and its bytes, copied and given back if
  // they are at most `limit`; if they are more, their length, and the chunk stays taken.
  nb::object read(uint64_t limit, double spin, double sleep) {
    Turn turn(taken_);
    if (reader_.ready()) {
      reader_.waiter.served_at_once();
    } else if (!wait(spin, sleep)) {
      return nb::none();
    }
    // Read once: it could change under a reader that is evicted.
    const uint64_t length = reader_.length();
    const uint32_t kind = reader_.kind();
    const bool sound = reader_.sound() && length <= layout_.max_chunk_bytes;
    if (sound && length > limit) return nb::make_tuple(kind, length);
    nb::object data;
    if (sound) data = nb::bytes(reinterpret_cast<const char*>(reader_.chunk()), length);
    if (reader_.evicted()) return nb::none();
    if (!sound) {
      PyErr_SetString(PyExc_ValueError,
                      "the ring's memory is damaged: a record is not what must follow");
      throw nb::python_error();
    }
    reader_.release();
    return nb::make_tuple(kind, data);
  }

  void release() {
    Turn turn(taken_);
    reader_.release();
  }

  uint32_t index() const { return reader_.index(); }
  uint64_t seq() const { return reader_.seq(); }
  bool ready() { return reader_.ready(); }
  bool active() const { return reader_.active(); }
  bool evicted() const { return reader_.evicted(); }
  uint64_t behind() const {
    const uint64_t next = reader_.ring().next_seq().load(std::memory_order_relaxed);
    return next > reader_.seq() ? next - reader_.seq() : 0;
  }
  uint32_t state() const { return reader_.ring().state().load(); }
  void interrupt() { kvindex::interrupt(reader_, taken_); }
  nb::dict statistics() const { return counters(reader_.waiter.counters); }

  bool wait_state(uint32_t bits, double sleep) {
    Turn turn(taken_);
    const GilReleased free;
    return reader_.wait_state(bits, nanoseconds(sleep));
  }

 private:
  bool wait(double spin, double sleep) {
    const GilReleased free;
    return reader_.wait(nanoseconds(spin), nanoseconds(sleep));
  }

  Layout layout_;
  Memory memory_;
  Reader reader_;
  std::atomic<bool> taken_{false};
};

}  // namespace

void bind_ring(nb::module_& module) {
  nb::class_<RingWriter>(module, "RingWriter")
      .def(nb::init<nb::handle, uint32_t, uint32_t, uint64_t>(), "memory"_a, "n_reader"_a,
           "max_chunks"_a, "max_chunk_bytes"_a)
      .def("write", &RingWriter::write, "kind"_a, "data"_a, "spin"_a, "sleep"_a)
      .def("wait", &RingWriter::wait, "spin"_a, "sleep"_a)
      .def("wait_attached", &RingWriter::wait_attached, "sleep"_a)
      .def("publish", &RingWriter::publish, "kind"_a, "length"_a)
      .def_prop_ro("index", &RingWriter::index)
      .def_prop_ro("seq", &RingWriter::seq)
      .def("admit", &RingWriter::admit)
      .def("awaited", &RingWriter::awaited)
      .def("remove", &RingWriter::remove, "reader"_a, "evict"_a)
      .def("reserve", &RingWriter::reserve, "reader"_a)
      .def("slot_state", &RingWriter::slot_state, "reader"_a)
      .def_prop_rw("state", &RingWriter::state, &RingWriter::set_state)
      .def("interrupt", &RingWriter::interrupt)
      .def("statistics", &RingWriter::statistics);
  nb::class_<RingReader>(module, "RingReader")
      .def(nb::init<nb::handle, uint32_t, uint32_t, uint64_t, uint32_t>(), "memory"_a,
           "n_reader"_a, "max_chunks"_a, "max_chunk_bytes"_a, "slot"_a)
      .def("attach", &RingReader::attach)
      .def("leave", &RingReader::leave)
      .def("read", &RingReader::read, "limit"_a, "spin"_a, "sleep"_a)
      .def("release", &RingReader::release)
      .def("ready", &RingReader::ready)
      .def("wait_state", &RingReader::wait_state, "bits"_a, "sleep"_a)
      .def_prop_ro("index", &RingReader::index)
      .def_prop_ro("seq", &RingReader::seq)
      .def_prop_ro("active", &RingReader::active)
      .def_prop_ro("evicted", &RingReader::evicted)
      .def_prop_ro("behind", &RingReader::behind)
      .def_prop_ro("state", &RingReader::state)
      .def("interrupt", &RingReader::interrupt)
      .def("statistics", &RingReader::statistics);
}

}  // namespace kvindex
