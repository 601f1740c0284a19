// The words If, Else, While, For, Where, End. They are macros with short names:
// include this after the headers of other libraries.
#ifndef QPU_MACROS_H
#define QPU_MACROS_H

#include "qpu/statement.h"

// Each opens a scope of C++, so that variables declared inside end there, and
// is one C++ statement from its word to End.
#define If(...)            \
  {                        \
    ::qpu::If_(__VA_ARGS__); \
    {
#define Else       \
  }                \
  ::qpu::Else_();  \
  {
#define While(...)            \
  {                           \
    ::qpu::While_(__VA_ARGS__); \
    {
#define For(init, condition, step) \
  {                                \
    init;                          \
    ::qpu::For_(condition);        \
    step;                          \
    ::qpu::ForBody_();             \
    {
#define Where(...)            \
  {                           \
    ::qpu::Where_(__VA_ARGS__); \
    {
#define End       \
  }               \
  ::qpu::End_();  \
  }

#endif
