// Type casters: keys and blobs are bytes in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>

#include "transfer/events.h"

NAMESPACE_BEGIN(NB_NAMESPACE)
NAMESPACE_BEGIN(detail)

template <std::size_t N>
struct type_caster<std::array<std::uint8_t, N>> {
  using Array = std::array<std::uint8_t, N>;
  NB_TYPE_CASTER(Array, const_name("bytes"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    if (!PyBytes_Check(source.ptr()) || PyBytes_Size(source.ptr()) != static_cast<Py_ssize_t>(N)) return false;
    std::copy_n(PyBytes_AsString(source.ptr()), N, value.begin());
    return true;
  }
  static handle from_cpp(const Array& source, rv_policy, cleanup_list*) noexcept {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(source.data()), static_cast<Py_ssize_t>(N));
  }
};

template <>
struct type_caster<baton::transfer::Blob> {
  NB_TYPE_CASTER(baton::transfer::Blob, const_name("bytes"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    if (!PyBytes_Check(source.ptr())) return false;
    const char* data = PyBytes_AsString(source.ptr());
    value.assign(data, data + PyBytes_Size(source.ptr()));
    return true;
  }
  static handle from_cpp(const baton::transfer::Blob& source, rv_policy, cleanup_list*) noexcept {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(source.data()),
                                     static_cast<Py_ssize_t>(source.size()));
  }
};

NAMESPACE_END(detail)
NAMESPACE_END(NB_NAMESPACE)
